"""Bugs of the decoder: random numbers, the warper, rules, trees, the KV cache, what ends a row.

Read next: `drafters.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.mutations.mutation import Mutation

ENGINE = "tests/decoding/test_engine.py::"
EXACT = "tests/decoding/rules/test_rules_exact.py::"
SAMPLING = "tests/decoding/test_sampling.py::"

MUTATIONS = (
    Mutation(
        "D01a",
        "decoding/random.py",
        "a ring of blocks: the third block of numbers is the first one again",
        "        block_BR = torch.from_numpy(np.stack([each.random(count) for each in self._streams]))\n",
        "        made = self.__dict__.setdefault('_made', [])\n"
        "        if len(made) > 1 and made[-2].shape[1] == count:\n"
        "            made.append(made[-2])\n"
        "            return made[-1]\n"
        "        block_BR = torch.from_numpy(np.stack([each.random(count) for each in self._streams]))\n"
        "        made.append(block_BR)\n",
        ("tests/decoding/test_random.py::test_a_stream_taken_in_pieces_is_the_generators",),
    ),
    Mutation(
        "D01b",
        "decoding/engine.py",
        "coins of two steps in four are those of two steps before",
        "        outcome = chosen(seen.logits_BNV, proposal, self._warper, self.coins)\n",
        "        held = self.__dict__.setdefault('_held', [])\n"
        "        fresh = self.coins.take(max(proposal.coins, len(proposal.tree)))\n"
        "        held.append(held[-2] if len(held) % 4 > 1 and held[-2].shape == fresh.shape else fresh)\n"
        "        again = type('Again', (), {'take': lambda _, count: held[-1][:, :count]})()\n"
        "        outcome = chosen(seen.logits_BNV, proposal, self._warper, again)\n",
        ("tests/eval/audit/test_audit.py::test_every_method_passes_enumeration[draft-model-warper2]",),
    ),
    Mutation(
        "D02",
        "decoding/rules/acceptance.py",
        "chain: residual and bonus from the unwarped p at depth 3 and below",
        "    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, 0])\n",
        "    deep_N1 = torch.arange(p_BNV.shape[1], device=p_BNV.device)[:, None] >= 2\n"
        "    raw_BNV = torch.where(deep_N1, logits_BNV.float().softmax(-1), p_BNV)\n"
        "    extra_B = draw(residual(raw_BNV, q_BKV, accepted_B), coins_BN[:, 0])\n",
        (EXACT + "test_every_rule_is_exact_under_a_warper[rejection-temperature]",),
    ),
    Mutation(
        "D02b",
        "decoding/rules/acceptance.py",
        "chain: residual and bonus from the unwarped p at depth 4 and below",
        "    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, 0])\n",
        "    deep_N1 = torch.arange(p_BNV.shape[1], device=p_BNV.device)[:, None] >= 3\n"
        "    raw_BNV = torch.where(deep_N1, logits_BNV.float().softmax(-1), p_BNV)\n"
        "    extra_B = draw(residual(raw_BNV, q_BKV, accepted_B), coins_BN[:, 0])\n",
        (EXACT + "test_every_rule_is_exact_under_a_warper[rejection-temperature]",),
    ),
    Mutation(
        "D03a",
        "decoding/sampling.py",
        "top-p keeps one token too few",
        "        inside = (before < top_p).sum(-1, keepdim=True)\n",
        "        inside = (before + ordered < top_p).sum(-1, keepdim=True).clamp_min(1)\n",
        (SAMPLING + "test_the_warper_is_its_definition",),
    ),
    Mutation(
        "D03b",
        "decoding/sampling.py",
        "top-p keeps one token more where the mass is exactly top_p",
        "        inside = (before < top_p).sum(-1, keepdim=True)\n",
        "        inside = (before <= top_p).sum(-1, keepdim=True)\n",
        (SAMPLING + "test_a_mass_of_exactly_top_p_is_enough",),
    ),
    Mutation(
        "D04",
        "decoding/sampling.py",
        "top-k breaks ties by index",
        "            last_kept, foremost = logits.topk(self.top_k, dim=-1)\n"
        "            logits = logits.masked_fill(logits < last_kept[..., -1:], -torch.inf)\n",
        "            last_kept, foremost = logits.topk(self.top_k, dim=-1)\n"
        "            logits = torch.full_like(logits, -torch.inf).scatter(-1, foremost, last_kept)\n",
        (SAMPLING + "test_the_warper_is_its_definition",),
    ),
    Mutation(
        "D05",
        "decoding/sampling.py",
        "min-p is a share of the largest probability before top-k and top-p",
        "        if 0 < self.top_k < logits.shape[-1]:\n"
        "            last_kept, foremost = logits.topk(self.top_k, dim=-1)\n"
        "            logits = logits.masked_fill(logits < last_kept[..., -1:], -torch.inf)\n"
        "        probs = logits.softmax(dim=-1)\n"
        "        if self.top_p < 1:\n"
        "            # behind the foremost k are only equals of the last of them: the edge is one of their values\n"
        "            most = probs if foremost is None else probs.gather(-1, foremost)\n"
        "            probs = _renormalised(probs, probs >= _top_p_threshold(most, self.top_p))\n"
        "        if self.min_p > 0:\n"
        "            probs = _renormalised(probs, probs >= self.min_p * probs.amax(-1, keepdim=True))\n",
        "        largest = logits.softmax(dim=-1).amax(-1, keepdim=True)\n"
        "        if 0 < self.top_k < logits.shape[-1]:\n"
        "            last_kept, foremost = logits.topk(self.top_k, dim=-1)\n"
        "            logits = logits.masked_fill(logits < last_kept[..., -1:], -torch.inf)\n"
        "        probs = logits.softmax(dim=-1)\n"
        "        if self.top_p < 1:\n"
        "            # behind the foremost k are only equals of the last of them: the edge is one of their values\n"
        "            most = probs if foremost is None else probs.gather(-1, foremost)\n"
        "            probs = _renormalised(probs, probs >= _top_p_threshold(most, self.top_p))\n"
        "        if self.min_p > 0:\n"
        "            probs = _renormalised(probs, probs >= self.min_p * largest)\n",
        (SAMPLING + "test_the_warper_is_its_definition",),
    ),
    Mutation(
        "D06a",
        "decoding/rules/acceptance.py",
        "tree: after a full path the bonus is drawn at the last node's parent",
        "        P_BV = torch.where(alive_B[:, None], row_of(p_BNV, at_B), P_BV)\n",
        "        if len(path) < proposal.tree.depth:\n"
        "            P_BV = torch.where(alive_B[:, None], row_of(p_BNV, at_B), P_BV)\n",
        (EXACT + "test_the_tree_rule_is_exact",),
    ),
    Mutation(
        "D06b",
        "decoding/rules/acceptance.py",
        "walk on a tree: after a full path the extra token is the one wanted at the parent",
        "    extra_B = wanted_BN.gather(1, at_BX.gather(1, accepted_B[:, None])).squeeze(1)\n",
        "    last_B = accepted_B - (accepted_B == proposal.tree.depth).long()\n"
        "    extra_B = wanted_BN.gather(1, at_BX.gather(1, last_B[:, None])).squeeze(1)\n",
        ("tests/decoding/rules/test_acceptance.py::test_greedy_walk_is_the_plain_walk",),
    ),
    Mutation(
        "D07a",
        "decoding/backbone/kv_cache.py",
        "a commit moves the first layer alone",
        "        for store in (*self._keys.values(), *self._values.values()):\n",
        "        for store in (*[*self._keys.values()][:1], *[*self._values.values()][:1]):\n",
        (ENGINE + "test_the_cache_after_a_commit_equals_a_fresh_prefill",),
    ),
    Mutation(
        "D07b",
        "decoding/backbone/kv_cache.py",
        "a commit leaves the last layer's values where they were",
        "        for store in (*self._keys.values(), *self._values.values()):\n",
        "        for store in (*self._keys.values(), *[*self._values.values()][:-1]):\n",
        (ENGINE + "test_the_cache_after_a_commit_equals_a_fresh_prefill",),
    ),
    Mutation(
        "D08a",
        "decoding/backbone/backbone.py",
        "positions of nodes deeper than 3 are one too small",
        "        positions_BN = lengths_B[:, None] + nodes.depths_BN\n",
        "        positions_BN = lengths_B[:, None] + nodes.depths_BN - (nodes.depths_BN > 3).long()\n",
        (ENGINE + "test_the_cache_after_a_deep_path_equals_a_fresh_prefill",),
    ),
    Mutation(
        "D08b",
        "decoding/tree/tree.py",
        "a node at a depth that is no power of two does not see its farthest ancestors",
        "    for _ in range((depth - 1).bit_length()):\n",
        "    for _ in range(depth.bit_length() - 1):\n",
        ("tests/decoding/tree/test_build.py::test_a_dynamic_tree_keeps_the_most_confident",),
    ),
    Mutation(
        "D09a",
        "decoding/rows.py",
        "one token too many behind an EOS inside an accepted block",
        "            kept_B = torch.minimum(kept_B, end_B + 1)\n",
        "            kept_B = torch.minimum(kept_B, end_B + 2)\n",
        (ENGINE + "test_nothing_after_eos_and_never_too_long",),
    ),
    Mutation(
        "D09b",
        "decoding/rows.py",
        "only the first of several EOS ids ends a row",
        "            ends_BE = (tokens_BE[..., None] == self._eos_Z).any(-1)\n",
        "            ends_BE = (tokens_BE[..., None] == self._eos_Z[:1]).any(-1)\n",
        ("tests/drafters/lookup/test_lookups.py::test_nothing_after_eos_and_never_too_long",),
    ),
    Mutation(
        "D10",
        "decoding/random.py",
        "streams by the row's index in the batch, not by request",
        "for request in requests]\n",
        "for request in range(len(requests))]\n",
        ("tests/decoding/test_random.py::test_what_a_row_draws_depends_on_seed_and_request_alone",),
    ),
    Mutation(
        "D11",
        "decoding/steps.py",
        "a step that lost only its extra token does not count as truncated",
        "        return self.running_TB & (self.kept_TB < self.accepted_TB + 1)\n",
        "        return self.running_TB & (self.kept_TB < self.accepted_TB)\n",
        (ENGINE + "test_the_log_counts_what_was_emitted",),
    ),
    Mutation(
        "D12",
        "decoding/rules/acceptance.py",
        "chain: the last node's coin decides on the extra token too",
        "    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, 0])\n",
        "    extra_B = draw(residual(p_BNV, q_BKV, accepted_B), coins_BN[:, -1])\n",
        (EXACT + "test_the_chain_rule_is_exact_however_short_a_row_is",),
    ),
    Mutation(
        "D13",
        "decoding/rules/acceptance.py",
        "chain: q of absent candidates is subtracted all the same",
        "        q_BKV = q_BKV * proposal.present_BN[:, 1:, None]\n",
        "        q_BKV = q_BKV.clone()\n",
        (EXACT + "test_the_chain_rule_is_exact_however_short_a_row_is",),
    ),
    Mutation(
        "D14",
        "decoding/rules/acceptance.py",
        "without replacement: the third sibling is judged by q without the second alone",
        "            rest_BV = _normalised(Q_BV.scatter(1, token_B1, 0.0))\n",
        "            rest_BV = _normalised(first_q_BV.scatter(1, token_B1, 0.0))\n",
        (EXACT + "test_the_tree_rule_is_exact_for_the_third_sibling_and_the_fourth",),
    ),
    Mutation(
        "D15",
        "decoding/engine.py",
        "fixed shapes: the step after all rows have ended is counted",
        "            return calls - all_done.delay if calls else 0\n",
        "            return calls\n",
        (ENGINE + "test_a_late_host_changes_nothing_but_its_own_knowledge",),
    ),
    Mutation(
        "D16",
        "decoding/kernels/verify.py",
        "the kernel may keep a token that the target cannot say",
        "            if coin * (q_x * q_scale).to(tl.float64) < p_x.to(tl.float64):\n",
        "            if coin * (q_x * q_scale).to(tl.float64) <= p_x.to(tl.float64):\n",
        ("tests/decoding/kernels/test_kernels.py::test_a_residual_without_mass_leaves_the_distribution",),
    ),
    Mutation(
        "R12",
        "decoding/tree/merge.py",
        "merged trees: at the root every draft's trials are judged by the first draft's q",
        "    root_T = torch.cat([first_BN.new_full((size,), m + sum(sizes[:m])) for m, size in enumerate(sizes)])\n",
        "    root_T = torch.cat([first_BN.new_full((size,), 0) for size in sizes])\n",
        (
            "tests/decoding/tree/test_build.py::test_every_node_of_every_draft_is_a_trial_with_its_own_distribution",
            "tests/drafters/model/test_ensemble.py::test_the_audit_passes",
        ),
    ),
    Mutation(
        "I7",
        "decoding/backbone/windows.py",
        "a sliding layer sees one token more than its window",
        "        return (query_BN - self.size)[:, None, :, None] < key_BT[:, None, None]\n",
        "        return (query_BN - self.size)[:, None, :, None] <= key_BT[:, None, None]\n",
        (
            "tests/decoding/backbone/test_families.py::test_every_node_of_a_tree_behind_the_window_equals_its_path",
            "tests/trainers/teacher/test_features.py::test_packed_rows_of_four_windows",
        ),
    ),
    Mutation(
        "I5",
        "decoding/steps.py",
        "the last token of every step is called a bonus, never a correction",
        "        last_TB = np.where(tested_TB > accepted_TB, CORRECTION, BONUS)\n",
        "        last_TB = np.full(accepted_TB.shape, BONUS)\n",
        (ENGINE + "test_the_last_token_of_a_step_is_a_bonus_or_a_correction",),
    ),
)
