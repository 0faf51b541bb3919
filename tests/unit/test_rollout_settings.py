"""Options of the hf rollout: what it cannot do is refused by name."""

import pytest

from psrl.errors import UnsupportedError
from psrl.rollout.settings import read_settings


def test_a_disabled_qat_group_is_no_obstacle():
    assert read_settings({"qat": {"enable": False, "mode": "w4a16"}}) == read_settings({})
    with pytest.raises(UnsupportedError, match=r"rollout\.qat\.enable=True"):
        read_settings({"qat": {"enable": True}})
