"""hosts.patching: a change to a host is made once, in any order of imports, and undone."""

import functools
import sys
from types import ModuleType

import pytest

from quest_core.hosts.patching import Patches, when_imported


@pytest.fixture
def late_host(tmp_path, monkeypatch):
    """A function that writes the source of `late_host`, a module which is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)
    yield (tmp_path / "late_host.py").write_text
    sys.modules.pop("late_host", None)


class Host:
    def run(self, x):
        return x

    value = 1


def plus_one(original):
    @functools.wraps(original)
    def run(*args):
        return original(*args) + 1

    return run


def test_wraps_once_and_undoes():
    patches, before = Patches(), dict(vars(Host))
    for _ in range(2):
        patches.wrap(Host, "run", plus_one)
        patches.put(Host, "value", 2)
        patches.put(Host, "new", 3)
    assert (Host().run(1), Host.value, Host.new) == (2, 2, 3)
    assert [(owner, name) for owner, name, _ in patches] == [(Host, "run"), (Host, "value"), (Host, "new")]
    patches.undo()
    assert dict(vars(Host)) == before
    patches.wrap(Host, "run", plus_one)
    assert Host().run(1) == 2
    patches.undo()


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
@pytest.mark.parametrize("inherited", [False, True])
def test_a_method_of_a_class_stays_one(kind, inherited):
    class Home:
        call = kind(lambda *arguments: len(arguments))

    class Heir(Home):
        pass

    owner = Heir if inherited else Home
    patches, before, stock = Patches(), dict(vars(owner)), owner.call(1)
    for _ in range(2):
        patches.wrap(owner, "call", plus_one)
    assert owner.call(1) == owner().call(1) == stock + 1
    assert type(vars(owner)["call"]) is kind
    patches.undo()
    assert dict(vars(owner)) == before
    patches.around(owner, "call", lambda original, *arguments: 10 * original(*arguments))
    assert owner.call(1) == owner().call(1) == 10 * stock
    patches.undo()


def test_two_owners_undo_in_any_order_of_their_own():
    first, second = Patches(), Patches()
    first.wrap(Host, "run", plus_one)
    second.wrap(Host, "run", plus_one)
    assert Host().run(1) == 3
    second.undo()
    assert Host().run(1) == 2
    first.undo()
    assert Host().run(1) == 1


HOST = """
def f():
    return 1

def g():
    return 10

class Block:
    def h(self):
        return 100
"""


@pytest.mark.parametrize("imported_first", [True, False])
def test_a_module_is_patched_in_any_order_of_imports(imported_first, late_host):
    late_host(HOST)
    patches = Patches()

    def load():
        return __import__("late_host")

    if imported_first:
        load()
    patches.when_imported("late_host", lambda: patches.wrap(sys.modules["late_host"], "f", plus_one))
    patches.around("late_host", "g", lambda original: original() + 1)
    patches.around("late_host:Block", "h", lambda original, self: original(self) + 1)
    for added in (1, 0):
        assert (load().f(), load().g(), load().Block().h()) == (1 + added, 10 + added, 100 + added)
        patches.undo()


def test_copies_of_a_function_are_wrapped_as_soon_as_its_module_is_imported(late_host):
    late_host(HOST)
    patches = Patches()
    patches.around("late_host", "f", lambda original: original() + 1, everywhere=True)
    sys.modules["late_copy"] = copy = ModuleType("late_copy")
    patches.undo()
    copy.f = __import__("late_host").f
    patches.around("late_host", "f", lambda original: original() + 1, everywhere=True)
    assert copy.f() == 2
    patches.undo()
    assert copy.f() == 1
    del sys.modules["late_copy"]


def test_what_is_still_waiting_is_withdrawn(late_host):
    late_host("")
    called = []
    patches = Patches()
    patches.when_imported("late_host", lambda: called.append("mine"))
    when_imported("late_host", lambda: called.append("another's"))
    patches.undo()
    __import__("late_host")
    assert called == ["another's"]


def test_what_is_no_attribute_is_done_once_and_undone():
    patches, registry = Patches(), dict[str, int]()
    for number in (1, 2):
        patches.once("entry", lambda number=number: registry.setdefault("quest", number), registry.clear)
    assert registry == {"quest": 1}
    patches.undo()
    assert not registry
    patches.once("entry", lambda: registry.setdefault("quest", 3), registry.clear)
    assert registry == {"quest": 3}


def test_every_copy_of_a_function_is_wrapped_and_restored():
    home, early, late = (ModuleType(f"copied_{name}") for name in ("home", "early", "late"))
    stock = home.run = early.run = lambda: 1
    patches, modules = Patches(), {module.__name__: module for module in (home, early, late)}
    sys.modules.update(modules)
    try:
        for _ in range(2):
            patches.around(home, "run", lambda original: original() + 1, everywhere=True)
        assert home.run is early.run is not stock
        assert home.run() == 2
        late.run = home.run
        patches.undo()
        assert home.run is early.run is late.run is stock
    finally:
        for name in modules:
            del sys.modules[name]


# --- when_imported --------------------------------------------------------------------------------------------------


def test_when_imported_waits_for_a_module_and_leaves_it_its_loader(late_host):
    late_host("song = 'tweet'\n")
    heard = []
    when_imported("late_host", lambda: heard.append(sys.modules["late_host"].song))
    when_imported("late_host", lambda: heard.append("again"))
    assert heard == []
    found = __import__("late_host")
    assert heard == ["tweet", "again"]
    assert type(found.__spec__.loader).__name__ == "SourceFileLoader"
    assert found.__loader__.get_source("late_host") == "song = 'tweet'\n"
    when_imported("late_host", lambda: heard.append("at once"))
    assert heard[-1] == "at once"


def test_an_action_that_fails_fails_the_import_and_is_due_again(late_host):
    late_host("")
    tried = []

    def act():
        tried.append(1)
        if len(tried) == 1:
            raise RuntimeError("not yet")

    when_imported("late_host", act)
    with pytest.raises(RuntimeError, match="not yet"):
        __import__("late_host")
    assert "late_host" not in sys.modules
    __import__("late_host")
    assert len(tried) == 2


def test_when_imported_waits_for_what_does_not_exist():
    when_imported("no_such_module_at_all", lambda: pytest.fail("it exists"))
    with pytest.raises(ImportError):
        import no_such_module_at_all  # noqa: F401
