"""Files that a caller names lie inside the roots, whatever the working folder is."""

from pathlib import Path

import pytest

from optiml.errors import InvalidInput
from optiml.settings import Settings
from optiml.workbench import Workbench


@pytest.fixture
def confined(tmp_path: Path) -> Workbench:
    root = tmp_path / "root"
    root.mkdir()
    (root / "k.cu").write_text("", encoding="utf-8")
    (tmp_path / "secret.cu").write_text("", encoding="utf-8")
    (root / "link.cu").symlink_to(tmp_path / "secret.cu")
    return Workbench(Settings(home=tmp_path / "home", roots=(root,)))


def test_a_relative_path_starts_at_the_root(confined: Workbench, tmp_path: Path) -> None:
    assert confined.allowed_path("k.cu") == tmp_path / "root" / "k.cu"
    assert confined.allowed_path(str(tmp_path / "root" / "k.cu")) == tmp_path / "root" / "k.cu"


@pytest.mark.parametrize("path", ["../secret.cu", "link.cu", "/etc/passwd", "k.cu/../../secret.cu", "../missing.cu"])
def test_a_path_outside_is_refused_whether_it_exists_or_not(confined: Workbench, path: str) -> None:
    with pytest.raises(InvalidInput, match="outside the allowed roots"):
        confined.allowed_path(path)
