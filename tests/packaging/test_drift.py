"""A release of SGLang that changes the contract is reported with the name of what changed.

Small sources stand for the modules of a release; the session ``drift`` reads real ones.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hicache_shared import contract, takeover
from hicache_shared.backend import HiCacheBackend
from hicache_shared.config import SGLANG_KEYS
from tools.sglang_drift import expected, release, shapes, table, wheel
from tools.sglang_drift.compare import differences, expected_of, key

NEWEST = expected.SUPPORTED[-1]

STORAGE = '''
STORAGE_BATCH_SIZE = 128

class PoolName(str, Enum):
    """Names."""
    KV = "kv"
    SWA = "swa"

@dataclass
class PoolTransfer:
    name: PoolName
    keys: Optional[List[str]] = None
    policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES

class HiCacheStorage(ABC):
    @abstractmethod
    def get(self, key: str, target: Optional[Any] = None) -> torch.Tensor | None: ...
    def batch_get_v1(self, keys: List[str], indices: torch.Tensor, extra_info=None): ...
    def _private(self): ...
'''
NAMES = ["PoolName", "PoolTransfer", "HiCacheStorage"]


def changes(old: str, new: str, text: str = STORAGE) -> str:
    assert old in text
    before, after = (
        shapes.class_shapes(source, NAMES) for source in (text, text.replace(old, new))
    )
    return "\n".join(differences("0.9.9", before, after))


def test_equal_sources_have_no_differences() -> None:
    assert changes("KV", "KV") == ""


def test_annotations_and_private_methods_are_no_part_of_the_contract() -> None:
    assert changes("keys: Optional[List[str]]", "keys: list[str] | None") == ""
    assert changes("indices: torch.Tensor", "indices") == ""
    assert changes("_private(self)", "_private(self, more)") == ""


def test_an_added_field_is_named_with_its_default_and_its_place() -> None:
    text = changes("policy:", "lease: int = 0\n    policy:")
    assert "SGLang 0.9.9: PoolTransfer.lease: is new, as lease = 0, after keys" in text
    assert "mend shared/src/hicache_shared/_mirror.py" in text


def test_a_removed_field_is_named_with_what_was_expected() -> None:
    text = changes("    keys: Optional[List[str]] = None\n", "")
    assert "PoolTransfer.keys: expected keys = None, and it is missing" in text


def test_a_renamed_field_is_named_by_both_names() -> None:
    text = changes("keys:", "hashes:")
    assert "PoolTransfer.keys: expected keys = None, and it is missing" in text
    assert "PoolTransfer.hashes: is new, as hashes = None, after name" in text


def test_a_changed_default_is_named_with_both() -> None:
    text = changes("PoolHitPolicy.ALL_PAGES", "None")
    assert (
        "PoolTransfer.policy: expected policy = PoolHitPolicy.ALL_PAGES, came policy = None" in text
    )


def test_a_field_that_lost_its_default_is_named() -> None:
    text = changes("List[str]] = None", "List[str]]")
    assert "PoolTransfer.keys: expected keys = None, came keys required" in text


def test_fields_in_another_order_are_named_with_both_orders() -> None:
    keys = "    keys: Optional[List[str]] = None"
    policy = "    policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES"
    text = changes(f"{keys}\n{policy}", f"{policy}\n{keys}")
    assert "PoolTransfer.policy: its place is another: expected keys there" in text
    assert "expected order name, keys, policy; came name, policy, keys" in text


def test_a_changed_order_of_parameters_names_the_method_and_both_orders() -> None:
    text = changes("keys: List[str], indices: torch.Tensor", "indices: torch.Tensor, keys")
    assert "HiCacheStorage.batch_get_v1: expected" in text
    assert "(self, keys, indices, extra_info=None), came" in text
    assert "(self, indices, keys, extra_info=None)" in text


def test_a_method_that_became_abstract_is_named() -> None:
    text = changes("    def batch_get_v1", "    @abstractmethod\n    def batch_get_v1")
    assert "came batch_get_v1 abstractmethod (self, keys" in text


def test_a_new_method_is_named() -> None:
    text = changes("    def _private", "    def batch_get_v3(self, plan): ...\n    def _private")
    assert "HiCacheStorage.batch_get_v3: is new, as batch_get_v3 (self, plan)" in text


def test_a_member_of_an_enum_is_named_by_its_value_and_the_order_is_free() -> None:
    assert "PoolName.SWA: expected SWA = 'swa', came SWA = 'window'" in changes('"swa"', '"window"')
    assert changes('KV = "kv"\n    SWA = "swa"', 'SWA = "swa"\n    KV = "kv"') == ""


def test_a_class_that_is_gone_is_named() -> None:
    assert "SGLang 0.9.9: PoolTransfer: expected it, and it is missing" in changes(
        "class PoolTransfer", "class Other"
    )


# -- the other parts of the contract ------------------------------------------------------------


def one(section: str, expected: shapes.Section, found: shapes.Section) -> str:
    return "\n".join(differences("0.9.9", {section: expected}, {section: found}))


def test_a_call_in_a_new_form_is_named() -> None:
    old = shapes.backend_calls(["self.storage_backend.batch_get_v2(a, extra_info=b)"])
    new = shapes.backend_calls(["c.storage_backend.batch_get_v2(a, b)\nother.clear()"])
    text = one(shapes.CALLS, old, new)
    assert "calls on a backend.batch_get_v2(_, extra_info=_): expected" in text
    assert "calls on a backend.batch_get_v2(_, _): is new" in text
    assert "shared/src/hicache_shared/backend.py" in text
    assert "clear" not in text


def test_a_new_key_of_the_extra_config_is_named() -> None:
    found = shapes.extra_keys(
        ['a.extra_config.pop("depth", 1)', 'extra_config.get("x")', 'd.get("y")']
    )
    assert found == {"depth": "read", "x": "read"}
    assert "keys of the extra config.depth: is new" in one(shapes.EXTRA_KEYS, {}, found)


def test_a_right_of_an_in_tree_name_is_named_with_the_function_that_gives_it() -> None:
    source = "def may(storage_backend):\n return storage_backend in ('mooncake', 'file')"
    found = shapes.rights_of_names([source, "def no(ep): return ep == 'mooncake'"], ["mooncake"])
    assert found == {"may": "mooncake"}
    assert ".may: is new, as may mooncake" in one(shapes.NAMES, {}, found)


def test_a_factory_that_makes_backends_another_way_is_reported() -> None:
    source = """
class StorageBackendFactory:
    @classmethod
    def register_backend(cls, name: str, module_path: str): ...
    @classmethod
    def _create_dynamic_backend(cls, config):
        required_fields = ["module_path"]
        return backend_class(config)
    @classmethod
    def _create_builtin_backend(cls, backend_name, backend_class):
        if backend_name in ("file", "sim"):
            return backend_class(1)
        elif backend_name == "mooncake":
            return backend_class(2)
"""
    found = shapes.factory_shape(source, {"mooncake": "mooncake makes", "file": "file makes"})
    assert found == {
        "register_backend": "classmethod (cls, name, module_path)",
        "dynamic needs": "['module_path']",
        "dynamic makes": "backend_class(config)",
        "file makes": "backend_class(1)",
        "mooncake makes": "backend_class(2)",
    }
    wanted = expected.REST[expected.FACTORY]
    text = one(expected.FACTORY, wanted, found)
    assert "StorageBackendFactory.register_backend: expected register_backend classmethod" in text
    assert "takeover.py" in text


def test_a_changed_constant_is_named() -> None:
    assert shapes.constant(STORAGE, "STORAGE_BATCH_SIZE") == "= 128"
    assert shapes.constant(STORAGE, "OTHER") is None
    text = one(shapes.CONSTANTS, {"STORAGE_BATCH_SIZE": "= 128"}, {"STORAGE_BATCH_SIZE": "= 64"})
    assert "expected STORAGE_BATCH_SIZE = 128, came STORAGE_BATCH_SIZE = 64" in text


def test_modules_of_a_release_make_up_its_contract_and_its_own_backends_do_not() -> None:
    modules = {
        release.STORAGE: STORAGE,
        release.METRICS: "@dataclass\nclass StorageMetrics:\n    pgs: int = 0",
        release.FACTORY: "class StorageBackendFactory: ...",
        release.PLUGINS: "GENERAL_PLUGINS_GROUP = 'g'",
        **dict.fromkeys(release.CONTROLLERS, "extra_config.pop('k')"),
        "sglang/srt/new.py": "storage_backend.fly(1)",
        f"{release.IN_TREE}x.py": "storage_backend.hidden(1)",
    }
    found = release.contract_of(modules)
    assert found["StorageMetrics"] == {"pgs": "= 0"}
    assert found[shapes.CALLS] == {"fly(_)": "called"}
    assert found[shapes.EXTRA_KEYS] == {"k": "read"}
    assert found[expected.PLUGINS] == {"GENERAL_PLUGINS_GROUP": "= 'g'"}


# -- what is expected of each release ------------------------------------------------------------


def ours() -> shapes.Contract:
    return release.our_contract((release.ROOT / release.MIRROR).read_text())


def test_an_older_release_lacks_what_came_later_and_has_what_went() -> None:
    newest = {"PoolTransfer": {"name": "required", "source": "= None", "block_pages": "= 0"}}
    gone = {"PoolTransfer.parts": expected.Gone("0.5.21", "source", "= None")}
    since = {"PoolTransfer.block_pages": "0.5.22"}
    old = expected_of("0.5.21", newest, since, gone)
    assert list(old["PoolTransfer"]) == ["name", "source", "parts"]
    assert expected_of("0.5.22", newest, since, gone) == newest
    assert expected_of("0.6.0rc1", newest, since, gone) == newest


def test_what_is_declared_names_members_that_there_are() -> None:
    for name in expected.SINCE:
        section, _, member = name.partition(".")
        assert member in ours()[section], name
    for name, gone in expected.UNTIL.items():
        section, _, member = name.partition(".")
        assert member not in ours()[section], name
        assert gone.after in ours()[section], name
    listed = [*expected.SINCE.values(), *(gone.last for gone in expected.UNTIL.values())]
    assert set(listed) <= set(expected.SUPPORTED)


def test_releases_are_in_order() -> None:
    assert list(expected.SUPPORTED) == sorted(expected.SUPPORTED, key=key)
    assert key("0.5.9") < key("0.5.21") < key("0.6.0rc1")
    with pytest.raises(ValueError, match="no version of SGLang"):
        key("latest")


def test_every_class_is_in_our_copy() -> None:
    assert {*expected.CLASSES, expected.METRICS} <= set(ours())


def test_the_constants_and_keys_are_those_that_the_code_uses() -> None:
    rest = expected.REST
    assert rest[shapes.CONSTANTS] == {"STORAGE_BATCH_SIZE": f"= {contract.STORAGE_BATCH_PAGES}"}
    assert set(rest[shapes.EXTRA_KEYS]) <= SGLANG_KEYS
    assert set(re.findall(r"'(\w+)'", rest[expected.FACTORY]["dynamic needs"])) <= SGLANG_KEYS


@pytest.mark.parametrize(
    "form", [form for form in expected.REST[shapes.CALLS] if not form.startswith("describe_")]
)
def test_our_backend_takes_every_call_that_sglang_makes(form: str) -> None:
    """``describe_l3_object_layout`` is asked of SGLang's own MooncakeStore alone."""
    method, arguments = form.rstrip(")").split("(")
    words = [word for word in arguments.split(", ") if word]
    named: dict[str, Any] = {word.removesuffix("=_"): None for word in words if "=" in word}
    signature = inspect.signature(getattr(HiCacheBackend, method))
    signature.bind(None, *[None for word in words if "=" not in word], **named)


def test_our_plugin_is_in_the_group_that_sglang_loads() -> None:
    project = tomllib.loads((release.ROOT / "shared" / "pyproject.toml").read_text())["project"]
    group = expected.REST[expected.PLUGINS]["GENERAL_PLUGINS_GROUP"].removeprefix("= ").strip("'")
    assert project["entry-points"][group] == {"hicache": "hicache_shared.takeover:register"}
    assert callable(takeover.register)


def test_the_names_that_are_taken_over_are_those_that_are_watched() -> None:
    assert set(expected.TAKEN_OVER) == set(takeover.ADAPTERS)


def test_the_session_of_sglang_tests_the_newest_supported_release() -> None:
    assert f'"sglang=={NEWEST}"' in (release.ROOT / "pyproject.toml").read_text()


# -- the table ------------------------------------------------------------------------------------


RESULTS = dict.fromkeys(expected.SUPPORTED, "6 pools")


def test_the_table_has_a_row_a_release_and_says_what_each_brought() -> None:
    rows = table.render(RESULTS).splitlines()[3:-1]
    assert [row.split()[1] for row in rows] == list(reversed(expected.SUPPORTED))
    assert "`PoolTransfer.block_pages`" in rows[-2]
    assert "without `PoolTransfer.anchor_index_parts`" in rows[-2]


def test_a_table_that_differs_is_a_problem_until_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "sglang.md"
    path.write_text(f"# A\n{table.BEGIN}\n{table.END}\nB\n")
    assert "nox -s drift -- --write" in str(table.problem(RESULTS, write=False, path=path))
    assert table.problem(RESULTS, write=True, path=path) is None
    assert table.problem(RESULTS, write=False, path=path) is None
    assert path.read_text() == f"# A\n{table.render(RESULTS)}\nB\n"
    other = RESULTS | {NEWEST: "5 pools"}
    assert "5 pools" in str(table.problem(other, write=False, path=path))


def test_a_document_without_the_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks the lines"):
        table.put(f"{table.END} {table.BEGIN}", "")


def test_the_document_lists_every_supported_release() -> None:
    rows = str(table.current(table.DOCUMENT.read_text())).splitlines()[3:-1]
    assert [row.split()[1] for row in rows] == list(reversed(expected.SUPPORTED))


# -- the wheel ------------------------------------------------------------------------------------


def test_a_wheel_that_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    path = tmp_path / "sglang-0.5.23-cp312-cp312-manylinux_2_34_x86_64.whl"
    path.touch()
    assert wheel.fetch("0.5.23", tmp_path) == path
    assert wheel.version_of(path) == "0.5.23"


def test_an_excerpt_has_the_stand_ins_and_the_releases_own_modules(tmp_path: Path) -> None:
    modules = {name: f"# {name}" for name in wheel.EXCERPT}
    wheel.unpack(modules, tmp_path)
    for name in wheel.EXCERPT:
        assert (tmp_path / name).read_text() == f"# {name}"
    assert "Stands in" in (tmp_path / "torch.py").read_text()
    assert not set(wheel.STAND_INS) & set(wheel.EXCERPT)
