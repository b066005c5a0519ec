"""The installer of UMBP's client on a machine that is imitated: no network, no root.

:class:`Machine` stands for the commands that the installer runs; the real ones run where the
sessions install the client.
"""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest

from tools.umbp_without_gpu import SetUpError, __main__, client, debian, stand_ins

URIS = """\
'http://other.example/tools/dists/stable/InRelease' other.example_dists_stable_InRelease 0
'http://other.example/tools/dists/stable/main/binary-amd64/Packages.xz' other_Packages 0
'http://mirror.example/security/dists/bookworm-security/main/binary-amd64/Packages.xz' s 0
'http://mirror.example/debian/dists/bookworm/InRelease' d_InRelease 0
'http://mirror.example/debian/dists/bookworm/main/binary-amd64/Packages.xz' d_Packages 0
'http://mirror.example/debian/dists/bookworm-updates/main/binary-amd64/Packages.xz' u 0
"""
MIRROR = "http://mirror.example/debian"
OLD, NEW = "2.36", "2.41"


class Interrupted(BaseException):
    """The run ends here, as by a signal."""


class Machine:
    """Answers the installer's commands and writes what they would.

    Attributes:
        glibc: the version of its C library.
        commands: those that were run, in words.
        sources: the lists of archives that apt was given.
        stop_after: how many commands may run before the run is interrupted.
    """

    def __init__(self, glibc: str) -> None:
        self.glibc = glibc
        self.commands: list[list[str]] = []
        self.sources: list[str] = []
        self.stop_after: int | None = None

    def run(self, *command: str | Path, cwd: Path | None = None) -> str:
        words = [str(word) for word in command]
        if self.stop_after is not None and len(self.commands) == self.stop_after:
            raise Interrupted
        self.commands.append(words)
        if words[0] == "getconf":
            return f"glibc {self.glibc}\n"
        if words[-1] == "update":
            (option,) = (word for word in words if word.startswith("Dir::Etc::SourceList="))
            self.sources.append(Path(option.split("=", 1)[1]).read_text())
        if "--print-uris" in words:
            return URIS
        if "download" in words and cwd is not None:
            (cwd / f"{words[-1]}.deb").touch()
        if "--extract" in words:
            libraries = Path(words[-1]) / debian.LIBRARIES
            libraries.mkdir(parents=True, exist_ok=True)
            (libraries / "ld-linux-x86-64.so.2").touch()
        if "pip" in words:
            self.pip(Path(words[0]), words[-1])
        if "--print-rpath" in words:
            return "$ORIGIN/../lib\n"
        if "-c" in words and not self.client(words[0]).exists():
            raise SetUpError("No module named 'mori'")
        return ""

    def client(self, python: str) -> Path:
        return Path(python).parents[1] / "lib/python3.12/site-packages/mori/libmori.so"

    def pip(self, python: Path, what: str) -> None:
        if what.startswith("amd-mori"):
            library = self.client(str(python))
            library.parent.mkdir(exist_ok=True)
            library.touch()
            library.with_name("umbp_master").touch()

    def ran(self, *words: str) -> list[list[str]]:
        """The commands that hold all of the words."""
        return [command for command in self.commands if set(words) <= set(command)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(OLD)
    for module in (client, debian, stand_ins):
        monkeypatch.setattr(module, "run", machine.run)
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "debian"})
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return machine


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The Python that the environment is made from."""
    python = tmp_path / "base/bin/python3.12"
    python.parent.mkdir(parents=True)
    python.write_text("base")
    return python


@pytest.fixture
def environment(tmp_path: Path, base: Path) -> Path:
    """A virtual environment as virtualenv makes it."""
    path = tmp_path / "environment"
    (path / "lib/python3.12/site-packages").mkdir(parents=True)
    (path / "bin").mkdir()
    (path / "bin/python").symlink_to(base)
    (path / "bin/python3").symlink_to("python")
    (path / "bin/python3.12").symlink_to("python")
    (path / "pyvenv.cfg").write_text(f"home = {base.parent}\nversion = 3.12.1\n")
    return path


def files_outside(environment: Path) -> set[Path]:
    root = environment.parent
    return {path for path in root.rglob("*") if not path.is_relative_to(environment)}


def test_the_packages_come_from_the_archive_of_the_machines_own_apt(
    machine: Machine, environment: Path
) -> None:
    client.install(environment)

    key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
    assert machine.sources == [
        f"deb {key} {MIRROR} bookworm main\n",
        f"deb {key} {MIRROR} trixie main\n",
    ]


def test_an_archive_without_updates_serves_where_there_is_no_other() -> None:
    line = "'http://mirror.example/debian/dists/sid/main/binary-amd64/Packages.xz' d_Packages 0"

    assert debian.archive_address(f"{line}\n") == MIRROR


def test_a_machine_without_package_archive_is_told_where_to_name_one() -> None:
    with pytest.raises(SetUpError, match=r"name the distribution's archive.* in /etc/apt"):
        debian.archive_address("'http://other.example/dists/x/extra/binary-amd64/Packages' p 0\n")


def test_all_that_is_written_is_inside_the_environment(machine: Machine, environment: Path) -> None:
    before = files_outside(environment)

    assert client.install(environment)

    assert files_outside(environment) == before
    assert "base" in (environment.parent / "base/bin/python3.12").read_text()


def test_with_an_old_c_library_the_python_is_a_copy_on_a_newer_one(
    machine: Machine, environment: Path, base: Path
) -> None:
    client.install(environment)

    libraries = environment / "umbp-without-gpu/c-library" / debian.LIBRARIES
    (command,) = machine.ran("--set-interpreter", str(environment / "umbp-without-gpu/python3.12"))
    assert str(libraries / "ld-linux-x86-64.so.2") in command
    assert f"{libraries}:{base.parent}/../lib" in command
    python = environment / "bin/python3.12"
    assert python.read_text() == "base"
    assert not python.is_symlink()
    for name in ("python", "python3"):
        assert (environment / "bin" / name).resolve() == python.resolve()


def test_with_a_new_c_library_the_python_stays(
    machine: Machine, environment: Path, base: Path
) -> None:
    machine.glibc = NEW

    client.install(environment)

    assert (environment / "bin/python3.12").resolve() == base
    assert not machine.ran("--set-interpreter")
    assert not (environment / "umbp-without-gpu/c-library").exists()


@pytest.mark.parametrize("glibc", [OLD, NEW])
def test_a_second_run_only_looks_whether_the_client_loads(
    machine: Machine, environment: Path, glibc: str
) -> None:
    machine.glibc = glibc
    assert client.install(environment)
    machine.commands.clear()

    assert not client.install(environment)

    programs = [(Path(words[0]).name, words[-1]) for words in machine.commands]
    assert programs == [("getconf", "GNU_LIBC_VERSION"), ("python3.12", "import mori.umbp")]


def test_another_version_is_installed_in_the_place_of_the_first(
    machine: Machine, environment: Path
) -> None:
    client.install(environment, "1.2.2")
    left = environment / "umbp-without-gpu/libraries/libold.so"
    left.touch()

    assert client.install(environment, "1.2.4")

    assert machine.ran("amd-mori==1.2.4")
    assert not left.exists()
    assert not client.install(environment, "1.2.4")


def test_what_was_removed_in_part_does_not_count_as_installed(
    machine: Machine, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> None:
        raise Interrupted

    client.install(environment, "1.2.4")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(Interrupted):
            client.install(environment, "1.2.2")

    assert client.install(environment, "1.2.4")


def test_a_client_that_is_gone_is_installed_again(machine: Machine, environment: Path) -> None:
    client.install(environment)
    shutil.rmtree(environment / "lib/python3.12/site-packages/mori")

    assert client.install(environment)


def test_a_run_that_ends_anywhere_leaves_a_python_that_starts_and_is_made_good(
    machine: Machine, environment: Path, base: Path
) -> None:
    client.install(environment)
    for stop in range(1, len(machine.commands)):
        (environment / "umbp-without-gpu/complete.json").write_text("{")
        machine.commands.clear()
        machine.stop_after = stop
        with pytest.raises(Interrupted):
            client.install(environment)
        python = environment / "bin/python3.12"
        loader = environment / "umbp-without-gpu/c-library" / debian.LIBRARIES
        assert python.resolve() == base or (loader / "ld-linux-x86-64.so.2").exists()
        machine.stop_after = None
        assert client.install(environment)
        assert not client.install(environment)


@pytest.mark.parametrize("content", ["", "{", '{"version": "1.2.4"}'])
def test_a_record_that_was_not_written_whole_counts_for_nothing(
    machine: Machine, environment: Path, content: str
) -> None:
    client.install(environment)
    (environment / "umbp-without-gpu/complete.json").write_text(content)

    assert client.install(environment)


def test_a_machine_of_another_kind_is_refused(
    machine: Machine, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    with pytest.raises(SetUpError, match=r"Linux on aarch64, and amd-mori .* x86_64"):
        client.install(environment)


def test_a_distribution_with_other_packages_is_refused(
    machine: Machine, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: {"ID": "fedora"})

    with pytest.raises(SetUpError, match=r"runs 'fedora'.*use a container of Debian 12"):
        client.install(environment)


@pytest.mark.parametrize(
    ("program", "package"),
    [("gcc", "gcc"), ("nm", "binutils"), ("apt-get", "apt"), ("dpkg-deb", "dpkg")],
)
def test_a_missing_program_is_named_with_its_package(
    machine: Machine,
    environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    package: str,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None if name == program else name)

    with pytest.raises(SetUpError, match=rf"apt-get install {package}$"):
        client.install(environment)


def test_a_folder_that_is_no_environment_of_python_312_is_refused(
    machine: Machine, environment: Path, tmp_path: Path
) -> None:
    with pytest.raises(SetUpError, match=r"run `python3.12 -m venv .*nowhere`"):
        client.install(tmp_path / "nowhere")
    (environment / "lib/python3.12").rename(environment / "lib/python3.11")
    with pytest.raises(SetUpError, match=r"no virtual environment of Python 3.12"):
        client.install(environment)


def test_an_environment_whose_python_is_gone_is_refused(
    machine: Machine, environment: Path, base: Path
) -> None:
    base.unlink()

    with pytest.raises(SetUpError, match=r"get python3.12 as README.md says"):
        client.install(environment)


def test_the_environment_that_runs_the_installer_is_refused(
    machine: Machine, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(environment))

    with pytest.raises(SetUpError, match="a Python outside the environment"):
        client.install(environment)


def test_the_command_says_that_hip_and_hsa_are_stand_ins(
    machine: Machine,
    environment: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["umbp_without_gpu", str(environment)])

    assert (__main__.main(), __main__.main()) == (0, 0)

    first, second = capsys.readouterr().out.splitlines()
    assert "amd-mori 1.2.4 is installed" in first
    assert "amd-mori 1.2.4 was there already" in second
    for line in (first, second):
        assert "HIP and HSA are stand-ins" in line
        assert "says anything about GPU memory or RDMA" in line


def test_the_command_tells_why_it_failed(
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["umbp_without_gpu", str(tmp_path)])

    assert __main__.main() == 1
    assert "UMBP's client was not installed: " in capsys.readouterr().err
