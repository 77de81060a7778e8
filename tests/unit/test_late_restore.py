"""Values that are restored before their variables exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import distribax as dx


class _Counting(Mapping[str, Any]):
    """Objects that count how often somebody looks at them."""

    num_looks = 0

    def __getitem__(self, name: str) -> Any:
        return {"v": 1.0}[name]

    def __iter__(self) -> Iterator[str]:
        self.num_looks += 1
        return iter(["v"])

    def __len__(self) -> int:
        return 1


def test_steps_do_not_look_for_late_values_again(tmp_path: Path) -> None:
    path = dx.Checkpoint(v=2.0, other=dx.Variable(1.0)).save(tmp_path / "ckpt")
    objects = _Counting()
    checkpoint = dx.Checkpoint(model=objects)
    checkpoint.restore(path)
    count = dx.Variable(0)
    step = dx.function(lambda: count.assign_add(1))
    step()
    before = objects.num_looks
    for _ in range(3):
        step()
    assert (objects.num_looks, int(count)) == (before, 4)
