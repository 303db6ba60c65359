import sys
from pathlib import Path

import pytest

from prefixcache.storage.host_memory import available_host_bytes

HOST_BYTES = 8000 * 1024


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:  16000 kB\nMemAvailable:  8000 kB\n")
    (folder / "self" / "cgroup").write_text("0::/pods/ours\n")
    return folder


def write_group(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_without_a_limit_it_is_what_the_host_has(proc: Path, tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup" / "pods" / "ours", "max", 500)
    assert available_host_bytes(proc, tmp_path / "cgroup") == HOST_BYTES
    assert available_host_bytes(proc, tmp_path / "no-cgroups") == HOST_BYTES


def test_a_containers_limit_counts_and_cached_file_pages_do_not(proc: Path, tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup" / "pods" / "ours", "1000", 600, inactive_file=250)
    assert available_host_bytes(proc, tmp_path / "cgroup") == 650


def test_the_tightest_limit_of_all_groups_above_counts(proc: Path, tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup" / "pods" / "ours", "1000", 600)
    write_group(tmp_path / "cgroup" / "pods", "2000", 1900)
    assert available_host_bytes(proc, tmp_path / "cgroup") == 100


def test_a_group_over_its_limit_has_nothing_left(proc: Path, tmp_path: Path) -> None:
    write_group(tmp_path / "cgroup" / "pods" / "ours", "1000", 1200)
    assert available_host_bytes(proc, tmp_path / "cgroup") == 0


def test_the_machine_that_runs_this_has_some_memory() -> None:
    assert 0 < available_host_bytes() < sys.maxsize
