"""What a running batch emits, against a list per row that is cut at EOS and at the limit."""

import torch
from draftsmith.decoding.proposal import Committed
from draftsmith.decoding.rows import Rows, overwrite
from hypothesis import given, settings
from hypothesis import strategies as st

steps = st.lists(
    st.lists(
        st.tuples(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=4, max_size=4)), min_size=3, max_size=3
    ),
    max_size=6,
)


@settings(deadline=None)
@given(steps, st.integers(1, 9), st.sampled_from([(), (5,), (4, 5)]))
def test_rows_hold_what_was_emitted_up_to_eos_and_the_limit(
    steps: list[list[tuple[int, list[int]]]], limit: int, eos: tuple[int, ...]
) -> None:
    rows = Rows([1, 2, 3], limit, eos, torch.device("cpu"))
    written: list[list[int]] = [[], [], []]
    done = [False] * 3
    for step in steps:
        count_B = torch.tensor([count for count, _ in step]) * ~rows.done_B
        rows.emit(torch.tensor([tokens for _, tokens in step]), count_B)
        kept = [0] * 3
        for row, (count, tokens) in enumerate(step):
            for token in tokens[:count]:
                if not done[row]:
                    written[row].append(token)
                    kept[row] += 1
                    done[row] = token in eos or len(written[row]) == limit
        assert rows.kept_B.tolist() == kept
        assert rows.done_B.tolist() == done
        assert rows.count_B.tolist() == [len(row) for row in written]
        assert rows.answers() == written


def test_overwriting_keeps_the_address() -> None:
    old = torch.arange(6).view(2, 3)
    part, address = old[:, :2], old.data_ptr()
    overwrite(part, torch.tensor([[True], [False]]), torch.full((2, 2), 9))
    assert old.tolist() == [[9, 9, 2], [3, 4, 5]]
    assert old.data_ptr() == address


def test_kept_features_of_a_chain_are_those_of_its_path() -> None:
    """A chain takes no gather; up to what was emitted it has the same states as the path says."""
    features_BNF = torch.randn(2, 4, 5)
    path_BD, count_B = torch.tensor([[1, 2, -1], [-1, -1, -1]]), torch.tensor([3, 1])
    tokens_BE = torch.zeros(2, 4, dtype=torch.long)
    by_path = Committed(tokens_BE, count_B, path_BD, features_BNF, features_BNF)
    as_chain = Committed(tokens_BE, count_B, path_BD, features_BNF, features_BNF, is_chain=True)
    for row, count in enumerate(count_B.tolist()):
        assert torch.equal(by_path.kept_features_BEF[row, :count], as_chain.kept_features_BEF[row, :count])
        assert torch.equal(by_path.kept_features_BEF[row, :count], features_BNF[row, :count])


def test_kept_features_of_a_tree_are_gathered_along_the_path() -> None:
    features_BNF = torch.randn(1, 6, 5)
    committed = Committed(
        torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), torch.tensor([[2, 5]]), features_BNF, features_BNF
    )
    assert torch.equal(committed.kept_features_BEF, features_BNF[:, [0, 2, 5]])
