"""Tables reach a GPU beside what it computes."""

import numpy as np
import pytest
import torch

from psrl.runtime.transfer import copy_stream, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_copy_does_not_wait_for_the_computation():
    device = torch.device("cuda", torch.cuda.current_device())
    table = np.arange(1000)
    to_device(table, device)  # memory is there from now on
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles: about a second
    computed = torch.cuda.Event()
    computed.record()
    copy = to_device(table, device)
    copy_stream(device.index).synchronize()
    assert not computed.query()
    assert (copy + 1).tolist() == list(range(1, 1001))  # after the computation, and after the copy
    assert computed.query()


def test_memory_of_a_copy_is_not_given_away_while_it_is_read():
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda._sleep(200_000_000)
    first = to_device(np.full(100_000, 1), device)
    total = first.sum()
    del first
    others = [to_device(np.full(100_000, 2), device) for _ in range(4)]
    assert int(total) == 100_000
    assert all(int(other.sum()) == 200_000 for other in others)
