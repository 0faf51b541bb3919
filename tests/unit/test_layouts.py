"""The ideal that a layout's speed-up is held against."""

import pytest

from benchmarks.layouts import ideal_speedup, layout_options, num_stages

PHASE = {
    "ideal_speedup": 4.0, "micro_batches": 5, "forwards_shared": 7, "forwards_unshared": 16,
    "unique_tokens": 900, "spine_tokens": 300,
}  # fmt: skip


def test_layouts():
    assert layout_options("1") == []
    assert layout_options("tp=2,pp=4") == ["--tp", "2", "--pp", "4"]
    assert (num_stages("1"), num_stages("dp=2"), num_stages("tp=2,pp=4")) == (1, 1, 4)


def test_without_stages_it_is_the_ratio_of_flops():
    assert ideal_speedup(PHASE, 1, 1) == 4.0


def test_stages_stretch_both_sides():
    # Unshared 17/16 of its work; shared 3/2 of the spine's forward, a tenth of its work, and 6/5 of the rest.
    assert ideal_speedup(PHASE, 1, 2) == pytest.approx(4.0 * 17 / 16 / (0.1 * 1.5 + 0.9 * 1.2))
    # Two mini-batches: half as many micro-batches a call.
    assert ideal_speedup(PHASE, 2, 2) == pytest.approx(4.0 * 9 / 8 / (0.1 * 2.0 + 0.9 * 1.4))


def test_forward_only_has_one_pass():
    phase = PHASE | {"forwards_shared": 5}
    assert ideal_speedup(phase, 1, 2) == pytest.approx(4.0 * 17 / 16 / 1.2)
