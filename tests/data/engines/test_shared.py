"""Values handed over by files."""

import pytest

from lpfs.data.engines.spark import SharedFolder, write_all


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_values_come_back_in_order_and_nothing_stays(tmp_path, kind):
    place = str(tmp_path / "all")
    if kind == "store":
        pytest.importorskip("fsspec")
        place = "memory://shared/"
    one, other = SharedFolder.create_in(place), SharedFolder.create_in(place)
    names = write_all(one, lambda count: ({"at": at} for at in range(count)), 3)
    kept = other.put("mine")
    one.put("left over")
    assert [one.take(name) for name in names] == [{"at": 0}, {"at": 1}, {"at": 2}]
    with pytest.raises((OSError, ValueError)):
        one.take(names[0])
    one.clear()
    one.clear()
    assert other.take(kept) == "mine"
    other.clear()
