import torch
from hypothesis import given
from hypothesis import strategies as st

from scaletrain_cli.engine.checkpoint.shard_file import Slice, overlaps
from scaletrain_cli.engine.parallel.mesh import ShardSpec

SHAPES = [(12,), (12, 5), (4, 12), (2, 12, 3)]


@st.composite
def slices(draw: st.DrawFn, shape: tuple[int, ...]) -> Slice:
    dim = shape.index(12)
    ranks, parts = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 3), (2, 2), (2, (4, 1, 1))]))
    spec = None if ranks == 1 else ShardSpec(dim, ranks, draw(st.integers(0, ranks - 1)), parts)
    numel = torch.Size(shape).numel() // ranks
    start = draw(st.integers(0, numel))
    return Slice("matrix", shape, spec, start, draw(st.integers(start, numel)))


def numbers(piece: Slice) -> list[int]:
    whole = torch.arange(torch.Size(piece.whole_shape).numel()).view(piece.whole_shape)
    local = whole if piece.shard_spec is None else piece.shard_spec.take(whole)
    return local.flatten()[piece.start : piece.stop].tolist()


@given(st.data())
def test_slices_overlap_where_they_have_the_same_elements(data: st.DataObject) -> None:
    shape = data.draw(st.sampled_from(SHAPES))
    first, second = data.draw(slices(shape)), data.draw(slices(shape))
    ours, theirs, shared = numbers(first), numbers(second), []
    for here, there, length in overlaps(first, second):
        assert ours[here : here + length] == theirs[there : there + length]
        shared += ours[here : here + length]
    assert sorted(shared) == sorted(set(ours) & set(theirs))


@given(st.data())
def test_a_slice_is_unchanged_after_writing_and_reading_it(data: st.DataObject) -> None:
    piece = data.draw(slices((4, 12)))
    assert Slice.from_json("matrix", piece.to_json()) == piece
