"""Bugs of the drafters: what they know of the text, which states and tokens they read, which q they declare.

Read next: `trainers.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.mutations.mutation import Mutation

DRAFT = "tests/drafters/model/test_draft_model.py::test_training_and_decoding_see_the_same_logits[qwen3]"
LOOKUPS = "tests/drafters/lookup/test_lookups.py::"
SHARED = "tests/drafters/vocabulary/test_shared_tokens.py::"
BLOCK = "tests/drafters/block/"
UNROLLED = "tests/drafters/eagle/test_proposer.py::test_every_declared_distribution_is_that_of_an_unrolled_network"
_DRAWN = (
    "            q.append(at_depth(warper, self.factors, k)(logits_BV))\n"
    "            tokens.append(draw(q[-1], random_BK[:, k]))\n"
)
_SLOTS_OWN = (
    "            q.append(at_depth(warper, self.factors, k)(self.head.laid_out(self.head.shaping(product_BU))))\n"
    "            tokens.append(draw(at_depth(warper, self.factors, k)(logits_BV), random_BK[:, k]))\n"
)

MUTATIONS = (
    Mutation(
        "R01a",
        "drafters/model/draft_model.py",
        "after a rejection all that was drafted counts as known",
        "        self._known_B.copy_(torch.minimum(written_B, self._history.lengths_B))\n",
        "        self._known_B.copy_(written_B)\n",
        (DRAFT,),
    ),
    Mutation(
        "R01b",
        "drafters/model/draft_model.py",
        "after a full acceptance the last drafted token is never read",
        "        written_B = self._history.lengths_B + self._drafted\n",
        "        written_B = self._history.lengths_B + self._drafted + 1\n",
        (DRAFT,),
    ),
    Mutation(
        "R02",
        "drafters/layers/draft_vocabulary.py",
        "EAGLE-3: while decoding every drafted id is one too large",
        "        self.ids_U = own\n",
        "        self.ids_U = None if own is None else (own + 1) % vocabulary\n",
        (UNROLLED,),
    ),
    Mutation(
        "R03",
        "drafters/eagle/proposer.py",
        "EAGLE-3: while decoding states are fused high to low",
        "        self.layers = net.config.layers\n",
        "        self.layers = net.config.layers[::-1]\n",
        (UNROLLED,),
    ),
    Mutation(
        "R04",
        "drafters/eagle/proposer.py",
        "EAGLE: positions stop growing after the second drafted pair",
        "        positions_BK = (self._start_B + self._depth)[:, None].expand(-1, K)\n",
        "        positions_BK = (self._start_B + min(self._depth, 1))[:, None].expand(-1, K)\n",
        (UNROLLED,),
    ),
    Mutation(
        "R05",
        "drafters/heads/medusa.py",
        "Medusa: a tree shallower than the heads are many takes the last of them",
        "        topk_BDR = self.logits()[:, : self.draft_length].topk(ranks).indices\n",
        "        topk_BDR = self.logits()[:, -self.draft_length :].topk(ranks).indices\n",
        ("tests/drafters/heads/test_medusa.py::test_what_the_engine_is_told",),
    ),
    Mutation(
        "R06",
        "drafters/heads/hydra.py",
        "Hydra: the first nodes of a level are read in place of those that are expanded",
        "            embeds_BYH = self._embed(tokens[-1][:, level.inner_Y])\n",
        "            embeds_BYH = self._embed(tokens[-1][:, : len(level.inner_Y)])\n",
        ("tests/drafters/heads/test_hydra.py::test_every_node_takes_its_rank_behind_its_path",),
    ),
    Mutation(
        "R07",
        "drafters/vocabulary/shared_tokens.py",
        "across vocabularies: a prompt's text behind its last special token is dropped",
        "        text += self.draft.encode(run)\n",
        "        text += [] if text else self.draft.encode(run)\n",
        (SHARED + "test_a_context_keeps_every_byte_whatever_the_tokens", SHARED + "test_special_tokens_of_a_prompt"),
    ),
    Mutation(
        "R07b",
        "drafters/vocabulary/shared_tokens.py",
        "across vocabularies: three bytes of a character of four are not cut off",
        "    for cut in range(min(3, len(data)) + 1):\n",
        "    for cut in range(min(2, len(data)) + 1):\n",
        (SHARED + "test_the_beginning_of_a_character_at_the_end_is_cut_off",),
    ),
    Mutation(
        "R08",
        "drafters/extras/ngram.py",
        "n-grams are counted across documents",
        "        texts = [np.asarray(document, dtype=np.int64) for document in documents]\n",
        "        texts = [np.concatenate([np.asarray(document, dtype=np.int64) for document in documents])]\n",
        (LOOKUPS + "test_the_ngram_table_is_the_plain_count",),
    ),
    Mutation(
        "R09a",
        "drafters/lookup/prompt_lookup.py",
        "the end of the text is a match of itself",
        "        earlier_BL = at_L < history.lengths_B[:, None]\n",
        "        earlier_BL = at_L <= history.lengths_B[:, None]\n",
        (LOOKUPS + "test_prompt_lookup_is_the_plain_search",),
    ),
    Mutation(
        "R09b",
        "drafters/lookup/prompt_lookup.py",
        "copies one slot beyond the text, where a rejected token stands",
        "match_B, self.draft_length, history.lengths_B + 1)\n",
        "match_B, self.draft_length, history.lengths_B + 2)\n",
        (LOOKUPS + "test_prompt_lookup_is_the_plain_search",),
    ),
    Mutation(
        "R10",
        "drafters/layers/true_states.py",
        "where rows accept unlike numbers, each one's last state is taken at the longest row's count",
        "positions_BE, mask, last_B1)\n",
        "positions_BE, mask, torch.full_like(last_B1, E - 1))\n",
        (UNROLLED,),
    ),
    Mutation(
        "R11",
        "drafters/model/adapters.py",
        "every row's prompt is read with the first row's adapter",
        "        self._now = self._names if kv_cache.row is None else [self._names[kv_cache.row]]\n",
        "        self._now = self._names if kv_cache.row is None else [self._names[0]]\n",
        ("tests/drafters/model/test_adapters.py::test_rows_with_adapters_of_their_own_draft_as_each_alone",),
    ),
    Mutation(
        "B01",
        "drafters/block/attention.py",
        "block drafters: in training a block sees the state of its own anchor",
        "anchor_RA, behind=0, ",
        "anchor_RA, behind=1, ",
        (BLOCK + "test_net.py::test_nothing_at_or_behind_the_anchor_and_no_other_document_is_seen",),
    ),
    Mutation(
        "B02",
        "drafters/block/walked.py",
        "DSpark: the declared q is the slot's own, without the token in front of the draft",
        _DRAWN,
        _SLOTS_OWN,
        ("tests/eval/audit/test_audit.py::test_every_method_passes_enumeration[dspark-warper2]",),
    ),
    Mutation(
        "B03",
        "drafters/model/chains.py",
        "DFlash: the likeliest tokens are drafted and called draws",
        "    drawn_BK = draw(q_BKV, random_BK)\n",
        "    drawn_BK = q_BKV.argmax(-1)\n",
        (BLOCK + "test_proposer.py::test_tokens_are_drawn_independently_from_what_is_declared",),
    ),
    Mutation(
        "B04",
        "drafters/eagle/peagle.py",
        "P-EAGLE: in training a mask pair sees the true pair behind its anchor",
        "anchor_BM, behind=1, ",
        "anchor_BM, behind=2, ",
        (
            "tests/drafters/eagle/test_peagle.py::test_pairs_behind_an_anchor_change_nothing",
            "tests/drafters/eagle/test_peagle.py::test_attention_is_that_of_a_mask",
        ),
    ),
    Mutation(
        "B05",
        "drafters/block/walked.py",
        "DFlash 2: the declared q is the slot's own, without the selector",
        _DRAWN,
        _SLOTS_OWN,
        ("tests/eval/audit/test_audit.py::test_every_method_passes_enumeration[dflash2-warper2]",),
    ),
    Mutation(
        "B06",
        "drafters/block/selected.py",
        "DFlash 2: in training a convolution reads across the beginning of a block",
        "        x_RABGg = x_RNH.unflatten(-1, (self.groups, -1)).unflatten(1, (-1, block))\n"
        "        delta_RABTG = delta_RNTG.unflatten(1, (-1, block))\n",
        "        x_RABGg = x_RNH.unflatten(-1, (self.groups, -1)).unflatten(1, (1, -1))\n"
        "        delta_RABTG = delta_RNTG.unflatten(1, (1, -1))\n",
        (BLOCK + "test_selected.py::test_no_block_is_read_by_the_next_one",),
    ),
    Mutation(
        "B07",
        "drafters/lookup/prompt_lookup.py",
        "prompt lookup's index: what followed is copied from one token too late",
        "self.tokens[end + 1 : end + 1 + count]\n",
        "self.tokens[end + 2 : end + 2 + count]\n",
        (
            LOOKUPS + "test_prompt_lookup_is_the_plain_search",
            LOOKUPS + "test_an_index_that_grows_is_that_of_the_whole_text",
        ),
    ),
    Mutation(
        "B08",
        "drafters/suffix/proposer.py",
        "suffix decoding: another thread's answers come and go while a batch drafts",
        "        with nullcontext() if self.memory is None else self.memory.lock:\n",
        "        with nullcontext():\n",
        ("tests/drafters/suffix/test_suffix.py::test_nothing_comes_or_goes_while_a_batch_drafts",),
    ),
    Mutation(
        "B09",
        "trainers/block/masked_chains.py",
        "PARD: in training a mask sees those of other chains",
        "    own_RMM = both_RMM & (anchor_RM[:, :, None] == anchor_RM[:, None]) & "
        "(depth_RM[:, :, None] >= depth_RM[:, None])\n",
        "    own_RMM = both_RMM & (depth_RM[:, :, None] >= depth_RM[:, None])\n",
        (
            "tests/trainers/block/test_masked_chains.py::test_kept_masks_see_what_rows_of_the_whole_copies_see",
            "tests/trainers/block/test_masked_chains.py::"
            "test_a_mask_in_training_is_the_mask_of_a_pass_behind_the_text",
        ),
    ),
    Mutation(
        "M01",
        "drafters/mtp/net.py",
        "MTP: the projection reads the hidden state in front of the embedding",
        "        pair_BNX = torch.cat((token_BNH, self.pre_fc_norm_hidden(hidden_BNH)), -1)\n",
        "        pair_BNX = torch.cat((self.pre_fc_norm_hidden(hidden_BNH), token_BNH), -1)\n",
        ("tests/drafters/mtp/test_mtp_own.py::test_one_step_is_that_of_transformers",),
    ),
    Mutation(
        "T15",
        "drafters/eagle/net.py",
        "EAGLE: in training rotary positions do not move on with the passes",
        "enter(self, hidden_BNH, embeds_BNH, self.rotary(positions_BN + j))\n",
        "enter(self, hidden_BNH, embeds_BNH, self.rotary(positions_BN))\n",
        ("tests/drafters/layers/test_passes.py::test_outputs_and_gradients_are_those_of_a_dense_mask",),
    ),
    Mutation(
        "V01",
        "drafters/layers/draft_vocabulary.py",
        "while decoding the ids of a draft vocabulary are one too large",
        "            self.ids_U = torch.tensor(list(only), device=layer.weight.device)\n",
        "            self.ids_U = torch.tensor(list(only), device=layer.weight.device).add(1) % vocabulary\n",
        ("tests/drafters/test_draft_vocabulary.py::test_what_is_drafted_is_what_training_compares",),
    ),
    Mutation(
        "V02",
        "drafters/block/selected.py",
        "DFlash 2: of a projection that is cut candidates look up the tables' first rows",
        "        best = top.indices if self._rows_U is None else self._rows_U[top.indices]\n",
        "        best = top.indices\n",
        ("tests/drafters/test_draft_vocabulary.py::test_a_cut_network_drafts_as_one_over_the_ids",),
    ),
)
