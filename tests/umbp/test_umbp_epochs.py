"""Epochs of a namespace: what a clear changes, and who sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_shared.errors import ClearError, ConfigError
from hicache_shared.testing.harness import storage_config
from hicache_umbp import UmbpBackend, epoch
from hicache_umbp.epoch import PrivateEpochs, SharedEpochs
from hicache_umbp.server import UmbpServer

pytestmark = pytest.mark.backend("umbp")

ONE, OTHER = "hc1/one", "hc1/other"


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """A path with a space, since mount tables escape it."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    path = folder / "s.sock"
    path.touch()
    return path


def test_a_clear_is_seen_through_a_link_to_the_socket(socket: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.sock"
    link.symlink_to(socket)
    clients = [SharedEpochs(socket), SharedEpochs(link)]
    seen = {""}
    for client in [*clients, *clients]:
        client.advance(ONE)
        (now,) = {each.of(ONE) for each in clients}
        assert now not in seen
        seen.add(now)


def test_no_epoch_comes_again_where_the_clock_goes_back(
    socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([2_000, 1_000, 1_000, 3_000])
    monkeypatch.setattr("hicache_umbp.epoch.time.time_ns", lambda: next(times))
    epochs, other = SharedEpochs(socket), SharedEpochs(socket)
    seen = [epochs.of(ONE)]
    for _ in range(4):
        epochs.advance(ONE)
        assert other.of(ONE) == epochs.of(ONE)
        seen.append(epochs.of(ONE))
    assert len(set(seen)) == 5


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_a_clear_is_of_one_namespace(socket: Path, kind: str) -> None:
    epochs = PrivateEpochs() if kind == "private" else SharedEpochs(socket)
    epochs.advance(ONE)
    epochs.advance(OTHER)
    before = epochs.of(OTHER)
    epochs.advance(ONE)
    assert epochs.of(OTHER) == before
    assert epochs.of("hc1/third") == ""


def test_a_socket_that_is_a_mount_of_its_own_is_told_by_the_mount_table(
    socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    monkeypatch.setattr(epoch, "MOUNTS", table)
    assert not SharedEpochs(socket).mounted_alone()
    line = "36 35 0:31 /b/s.sock {} rw,relatime - tmpfs tmpfs rw\n"
    table.write_text(line.format(str(socket.parent).replace(" ", r"\040")))
    assert not SharedEpochs(socket).mounted_alone()
    table.write_text(line.format(str(socket).replace(" ", r"\040")))
    assert SharedEpochs(socket).mounted_alone()
    with pytest.raises(ClearError, match="mounted without its folder"):
        SharedEpochs(socket).advance(ONE)


def test_a_client_that_would_not_see_the_clears_of_others_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with UmbpServer(capacity_bytes=64 << 20) as server:
        config = storage_config(is_mla_model=False, extra={"standalone_address": server.address})
        UmbpBackend(config, {}).close()
        monkeypatch.setattr("hicache_umbp.epoch.device_of", lambda path: id(path))
        with pytest.raises(ConfigError, match="would not be seen here; mount the folder"):
            UmbpBackend(config, {})
