"""What an SSM covers of the target's continuations, and what is left for the next one.

A label is matched where the SSM's likeliest token is the label, given the text in front of it. A
stretch is covered where all of its labels are: then, and only then, the SSM's own greedy
continuation from the beginning of the stretch *is* the stretch (by induction over its tokens). So
one forward pass over the text says what decoding would say, from every position at once.
Boost-tuning is SpecInfer's (Miao et al. 2023, arXiv 2305.09781, section 3): the next SSM learns
what the ones before do not cover. Weights that follow acceptance softly are ours, after AdaBoost
(Freund and Schapire 1997). Read next: `boost.py`.

Shapes: R samples, S tokens of a sample, K SSMs, P labelled positions, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...drafters.projection import Projection
from ..method_config import BoostConfig


@torch.no_grad()
def matched(hidden_PH: Tensor, projection: Projection, label_P: Tensor, chunk: int) -> Tensor:
    """Whether the likeliest token is the label, bool [P]; the lowest id wins a tie, as decoding."""
    matches = [
        projection.logits(hidden_CH).argmax(-1) == label_C
        for hidden_CH, label_C in zip(hidden_PH.split(chunk), label_P.split(chunk), strict=True)
    ]
    return torch.cat(matches) if matches else label_P.bool()


def runs(matched_RS: Tensor, label_RS: Tensor) -> Tensor:
    """Labels matched one after another from each label on, int64 [R, S]; 0 where none begins.

    Args:
        matched_RS: bool, whether the token at s was predicted.
        label_RS: bool, whether it is a label; those of a sample stand side by side.
    """
    run_R = torch.zeros_like(matched_RS[:, 0], dtype=torch.long)
    runs_R = []
    for s in reversed(range(matched_RS.shape[1])):
        run_R = (run_R + 1) * (matched_RS[:, s] & label_RS[:, s])
        runs_R.append(run_R)
    return torch.stack(runs_R[::-1], 1)


def windows(label_RS: Tensor, length: int) -> Tensor:
    """Labels of the stretch that begins at each label: `length`, or what is left of the sample.

    A `length` of 0 is all that is left. int64 [R, S], 0 where no label is.
    """
    left_RS = runs(label_RS, label_RS)
    return left_RS.clamp_max(length) if length else left_RS


def acceptance(matched_RS: Tensor, label_RS: Tensor, config: BoostConfig) -> Tensor:
    """Share of each label's stretch that is accepted before the first miss, fp32 [R, S].

    1 is a stretch that is covered. With `unit` sample the stretch begins with the continuation and
    every label of the sample has its value; with `unit` span it begins at the label itself. 0 where
    no label is.
    """
    window_RS = windows(label_RS, config.match_tokens)
    accepted_RS = torch.minimum(runs(matched_RS, label_RS), window_RS)
    share_RS = accepted_RS.float() / window_RS.clamp_min(1)
    if config.unit == "span":
        return share_RS
    first_R1 = label_RS.long().argmax(1, keepdim=True)
    return share_RS.gather(1, first_R1) * label_RS


def weights(accepted: Sequence[Tensor], label_RS: Tensor, config: BoostConfig) -> Tensor:
    """How much each label counts for the next SSM, fp32 [R, S], not normalised; 0 where none is.

    Args:
        accepted: `acceptance` of every SSM before, [R, S] each.

    A unit counts by `hard` 0 where one of them covers it, by `soft` the product of
    exp(-soft * acceptance) over them, by `none` 1, which makes copies. A span is an example of all
    its labels, as a sample is: a label counts the mean of the spans that it stands in. (Were it
    the span that begins at it alone, an SSM would learn the first word of what others miss and
    never how to go on.)
    """
    weight_RS = label_RS.float()
    for accepted_RS in accepted:
        if config.weights == "hard":
            weight_RS = weight_RS * (accepted_RS < 1)
        elif config.weights == "soft":
            weight_RS = weight_RS * (-config.soft * accepted_RS).exp()
    if config.unit == "sample":
        return weight_RS
    spans_RS = _sum_over_spans(label_RS.float(), config.match_tokens).clamp_min(1)
    return label_RS * _sum_over_spans(weight_RS, config.match_tokens) / spans_RS


def _sum_over_spans(weight_RS: Tensor, length: int) -> Tensor:
    """Sum of what the spans count in which each position stands: those that begin at it or up to
    `length` - 1 positions before it; with 0 all that begin before it. [R, S]."""
    padded_RS = F.pad(weight_RS, (length - 1 if length else weight_RS.shape[1] - 1, 0))
    return padded_RS.unfold(1, padded_RS.shape[1] - weight_RS.shape[1] + 1, 1).sum(-1)


def left_share(accepted: Sequence[Tensor], label_RS: Tensor) -> float:
    """Share of labels whose stretch no SSM covers: 1 before the first one."""
    open_RS = label_RS
    for accepted_RS in accepted:
        open_RS = open_RS & (accepted_RS < 1)
    return float(open_RS.sum() / label_RS.sum().clamp_min(1))


def union_length(matched_RS: Sequence[Tensor], label_RS: Tensor, length: int) -> float:
    """Mean over labels of the tokens that the longest of the SSMs' drafts predicts, up to `length`.

    With one more it is what a target call yields at temperature 0 where calls begin at any label
    alike. Positions too near to the sample's end for a whole draft are left out.
    """
    longest_RS = torch.stack([runs(each, label_RS).clamp_max(length) for each in matched_RS]).amax(0)
    whole_RS = windows(label_RS, length) == length
    return float((longest_RS * whole_RS).sum() / whole_RS.sum().clamp_min(1))
