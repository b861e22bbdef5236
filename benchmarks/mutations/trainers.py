"""Bugs of training: labels, teachers, losses, the loop's arithmetic, what a resumed run gets back.

Read next: `others.py`.
"""

from __future__ import annotations

from draftsmith.benchmarks.mutations.mutation import Mutation

DIVERGENCES = "tests/trainers/losses/test_divergences.py::"
EAGLE = "tests/trainers/test_eagle.py::"
MEDUSA = "tests/trainers/test_medusa.py::test_the_loss_is_the_plain_formula"
OPTIMIZER = "tests/trainers/loop/test_optimizer.py::"
RESUME = "tests/trainers/loop/test_resume.py::"

MUTATIONS = (
    Mutation(
        "T01a",
        "trainers/heads.py",
        "heads: the teacher's distribution is that of one token later",
        "            teacher = self._teacher(hidden_RSH[:, k:-1][place])\n",
        "            teacher = self._teacher(hidden_RSH[:, k + 1 :][place])\n",
        (MEDUSA,),
    ),
    Mutation(
        "T01b",
        "trainers/labels.py",
        "a label several tokens ahead may stand in another document",
        "    return loss_mask_RS[:, ahead:] & same_RX\n",
        "    return loss_mask_RS[:, ahead:].clone()\n",
        (EAGLE + "test_loss_and_terms_are_those_of_documents_alone",),
    ),
    Mutation(
        "T03",
        "trainers/heads.py",
        "heads: the teacher is made by the heads' own projection, which is the target's at first",
        "Teacher(hidden_PH, self._frozen[0].whole, cut=cut)\n",
        "Teacher(hidden_PH, (self.losses[0] if len(self.losses) else self._frozen[0]).whole, cut=cut)\n",
        (MEDUSA,),
    ),
    Mutation(
        "I6",
        "trainers/losses/chunked.py",
        "the gradient of a capped head is that of its logits, not of its product",
        "        terms = loss(shaping(product_CV.requires_grad_(wanted)), outputs, label_C)\n",
        "        product_CV = shaping(product_CV)\n"
        "        terms = loss(product_CV.requires_grad_(wanted), outputs, label_C)\n",
        ("tests/trainers/losses/test_chunked.py::test_a_bias_a_scale_and_a_cap",),
    ),
    Mutation(
        "T04",
        "trainers/loop/step.py",
        "accumulation: each micro-batch is divided by its own labels",
        "        scale = self.accelerator.num_processes / labels\n",
        '        scale = self.accelerator.num_processes / max(1, int(batch["loss_mask"].sum()) * count)\n',
        (RESUME + "test_accumulation_does_not_change_the_mathematics",),
    ),
    Mutation(
        "T05",
        "trainers/loop/step.py",
        "the gradient is clipped when the step is over, so never",
        "            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), self.optimizer.clip)\n",
        '            norm = self.accelerator.clip_grad_norm_(self.wrapped.parameters(), float("inf"))\n',
        (RESUME + "test_gradients_are_clipped_before_the_step_as_the_recipe_says",),
    ),
    Mutation(
        "T06",
        "trainers/loop/optimizer.py",
        "the warm-up counts from 0: the first step has rate 0",
        "        return config.lr * (step + 1) / config.warmup_steps\n",
        "        return config.lr * step / config.warmup_steps\n",
        (OPTIMIZER + "test_the_rate_of_every_schedule",),
    ),
    Mutation(
        "T06b",
        "trainers/loop/optimizer.py",
        "no warm-up",
        "    if step < config.warmup_steps:\n",
        "    if step < 0:\n",
        (OPTIMIZER + "test_the_rate_of_every_schedule",),
    ),
    Mutation(
        "T07",
        "trainers/boost.py",
        "boosting: what is left is measured by the last SSM alone",
        "        accepted = [acceptance(each.train, self.label_RS, self.boost) for each in self.matches]\n",
        "        accepted = [acceptance(each.train, self.label_RS, self.boost) for each in self.matches[-1:]]\n",
        ("tests/trainers/test_boost.py::test_what_any_ssm_before_covers_is_left_out",),
    ),
    Mutation(
        "T08",
        "trainers/loop/snapshot.py",
        "a resumed run begins its moving average anew",
        '            self.average.load(load_file(folder / "average.safetensors"))\n',
        '            load_file(folder / "average.safetensors")\n',
        (RESUME + "test_every_cut_resumes_to_the_same_bits[{'ema': 0.9}]",),
    ),
    Mutation(
        "T09a",
        "trainers/loop/snapshot.py",
        "a resumed run forgets the rows that the models wrote",
        "            self.rollouts.recall(load_file(rows), team.process_index, team.num_processes)\n",
        "            load_file(rows)\n",
        ("tests/trainers/teacher/test_rollouts.py::test_every_cut_resumes_to_the_same_bits[student]",),
    ),
    Mutation(
        "T09b",
        "trainers/loop/loop.py",
        "models that write rows draw the same numbers at every step",
        '        seed = seed_of(f"{self.plan.loop.seed}/{step}/rollouts")\n',
        '        seed = seed_of(f"{self.plan.loop.seed}/rollouts")\n',
        (RESUME + "test_rollouts_draw_anew_at_every_step_and_the_same_in_every_run",),
    ),
    Mutation(
        "T10",
        "trainers/loop/loop.py",
        "validation takes training rows",
        "        held_out = self.validation_rows\n",
        "        held_out = self.train_rows\n",
        (RESUME + "test_validation_asks_for_no_training_row",),
    ),
    Mutation(
        "T11",
        "trainers/student/lora.py",
        "LoRA: alpha is the rank, so the scaling is always 1",
        "    scale: Any = alpha\n",
        "    scale: Any = rank\n",
        ("tests/drafters/model/test_adapters.py::test_an_adapter_is_added_by_alpha_over_rank",),
    ),
    Mutation(
        "T12",
        "trainers/losses/mix.py",
        "reverse KL with its arguments swapped",
        '    "reverse_kl": lambda mix, distributions: d.reverse_kl(distributions.log_p_CU, distributions.log_q_CU),\n',
        '    "reverse_kl": lambda mix, distributions: d.reverse_kl(distributions.log_q_CU, distributions.log_p_CU),\n',
        ("tests/trainers/losses/test_objectives.py::test_the_draft_vocabulary_sees_what_it_can",),
    ),
    Mutation(
        "T13a",
        "trainers/losses/divergences.py",
        "total variation without the one half",
        "    return 1 - overlap(log_p_CV, log_q_CV, siblings)\n",
        "    return 2 * (1 - overlap(log_p_CV, log_q_CV, siblings))\n",
        (DIVERGENCES + "test_values_and_gradients",),
    ),
    Mutation(
        "T13b",
        "trainers/losses/divergences.py",
        "total variation as half the sum of |p - q| where p lacks mass that cannot be drafted",
        "    return 1 - overlap(log_p_CV, log_q_CV, siblings)\n",
        "    return 0.5 * (log_p_CV.exp() - log_q_CV.exp()).abs().sum(-1)\n",
        (DIVERGENCES + "test_mass_that_cannot_be_drafted_is_never_accepted",),
    ),
    Mutation(
        "T14",
        "trainers/losses/divergences.py",
        "JSD: beta on the wrong distribution in the mean, the same at 0.5",
        "    mean_CV = beta * p_CV + (1 - beta) * q_CV\n",
        "    mean_CV = (1 - beta) * p_CV + beta * q_CV\n",
        (DIVERGENCES + "test_values_and_gradients",),
    ),
    Mutation(
        "T16",
        "trainers/eagle.py",
        "EAGLE: noise in validation too",
        "        if not (self.training and self._config.noise):\n",
        "        if not self._config.noise:\n",
        (EAGLE + "test_noise_is_uniform_and_for_training_alone",),
    ),
    Mutation(
        "T17",
        "trainers/loop/optimizer.py",
        "weight decay on norms and biases too",
        "*vectors.listed(weight_decay=0.0)]",
        "*vectors.listed(weight_decay=decay)]",
        (OPTIMIZER + "test_matrices_decay_and_vectors_do_not",),
    ),
    Mutation(
        "T18",
        "trainers/loop/loop.py",
        "validation with the trained weights although an average is kept",
        "        with self.averaged(), torch.no_grad(), _eval_mode(self.module):\n",
        "        with torch.no_grad(), _eval_mode(self.module):\n",
        (RESUME + "test_with_a_moving_average_the_validation_loss_is_that_of_the_average",),
    ),
    Mutation(
        "T19",
        "trainers/losses/divergences.py",
        "LK-lambda: a gradient through the weight",
        "    share_C = (-eta * (1 - tv_C.detach())).exp()\n",
        "    share_C = (-eta * (1 - tv_C)).exp()\n",
        (DIVERGENCES + "test_values_and_gradients",),
    ),
    Mutation(
        "T20",
        "trainers/loop/optimizer.py",
        "schedule wsd decays from the start",
        "        share = min(1.0, (1 - done) / config.decay_share)\n",
        "        share = 1 - done\n",
        (OPTIMIZER + "test_the_rate_of_every_schedule[wsd]",),
    ),
    Mutation(
        "T21",
        "trainers/loop/loop.py",
        "of equal probes the earlier is kept, which has learnt less",
        '        return self.best is None or values["tau"] >= self.best["tau"]\n',
        '        return self.best is None or values["tau"] > self.best["tau"]\n',
        (RESUME + "test_a_checkpoint_of_another_run_brings_its_best_along",),
    ),
    Mutation(
        "T22",
        "trainers/loop/order.py",
        "every epoch has the rows in the same order",
        "        return int(_permutation(self.rows, self.seed, epoch)[index])\n",
        "        return int(_permutation(self.rows, self.seed, 0)[index])\n",
        ("tests/trainers/loop/test_order.py::test_a_step_is_the_same_whoever_asks_and_when",),
    ),
    Mutation(
        "A02a",
        "trainers/packed/masks.py",
        "attention crosses packed documents in training",
        "    return (same_RSS & causal_SS)[:, None]\n",
        "    return causal_SS.expand_as(same_RSS)[:, None]\n",
        (MEDUSA,),
    ),
    Mutation(
        "I2",
        "trainers/loop/step.py",
        "a skipped step shrinks every weight by a hundredth",
        "            self.skipped += 1\n",
        "            self.skipped += 1\n"
        "            with torch.no_grad():\n"
        "                for weight in self.wrapped.parameters():\n"
        "                    weight.mul_(0.99)\n",
        (RESUME + "test_a_skipped_step_leaves_every_weight_as_it_was",),
    ),
    Mutation(
        "V03",
        "trainers/losses/mix.py",
        "labels are one place too far in the draft vocabulary",
        "    return torch.where(ids_U[index_P] == label_P, index_P, UNKNOWN)\n",
        "    return torch.where(ids_U[index_P] == label_P, (index_P + 1) % len(ids_U), UNKNOWN)\n",
        ("tests/trainers/losses/test_draft_vocabulary.py::test_a_part_is_the_whole_cut_to_its_tokens",),
    ),
)
