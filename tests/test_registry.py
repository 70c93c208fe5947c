"""Mechanisms of installed packages: they work like ours, and a broken package is a record with its cause."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributions import COSINE, write_distribution

import quest_core
from quest_core import ConfigError, cli
from quest_core.cli.new import copy_example
from quest_core.registry import mechanisms, owner, packages, temporary


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a distribution quest-<name> whose module <name>_of_a_test has this source."""
    monkeypatch.syspath_prepend(tmp_path)
    with temporary():

        def write(name, source):
            module = f"{name}_of_a_test"
            entry_points = {"quest.attention": {name: module}}
            write_distribution(tmp_path, f"quest-{name}", {f"{module}.py": source}, entry_points)
            packages.cache_clear()

        yield write
        for module in [module for module in sys.modules if module.endswith("_of_a_test")]:
            del sys.modules[module]


def test_a_package_adds_a_mechanism(package, capsys):
    package("cosine", COSINE.format(name="cosine10"))
    q, k, v = torch.randn(3, 1, 2, 4, 8)
    want = (10 * torch.cosine_similarity(q[..., :, None, :], k[..., None, :, :], dim=-1)).softmax(-1) @ v
    torch.testing.assert_close(quest_core.attention(q, k, v, "cosine10"), want)
    assert "cosine10" in quest_core.list_mechanisms()
    assert owner(mechanisms()["cosine10"]) == "quest-cosine 1.2"
    assert cli.main(["list"]) == 0
    assert "From quest-cosine 1.2\n  cosine10         10 cos(q, k)" in capsys.readouterr().out


def test_a_mechanism_that_is_registered_again_has_its_new_formula():
    """As a cell of a notebook that is changed and runs twice."""
    q, k, v = torch.randn(3, 1, 2, 4, 8)

    def cell(factor):
        @quest_core.register("of_a_cell", source="this test")
        class OfACell(quest_core.Score):
            causal = cross = True

            def query(self, q):
                return factor * q

        return quest_core.attention(q, k, v, "of_a_cell")

    with temporary():
        assert not torch.equal(cell(2.0), cell(3.0))
        torch.testing.assert_close(cell(3.0), quest_core.Mechanism("of_a_cell")(q, k, v))


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import missing_of_a_test", "ModuleNotFoundError: No module named 'missing_of_a_test'"),
        (COSINE.format(name="Quest"), "ConfigError: .*Cosine10: name 'Quest' is taken by 'quest' of quest_core"),
    ],
)
def test_a_broken_package_disables_only_itself(package, capsys, source, cause):
    package("broken", source)
    package("healthy", COSINE.format(name="cosine10"))
    assert "cosine10" in quest_core.list_mechanisms()
    with pytest.raises(ConfigError, match=f"not usable: quest-broken 1.2 .broken_of_a_test.: {cause}.*; fix: pip"):
        quest_core.AttentionConfig.parse("qust")
    assert cli.main(["list"]) == 0
    assert "Not usable: quest-broken 1.2" in capsys.readouterr().out


def test_in_tree_names_import_no_package(package):
    package("unread", "raise AssertionError")
    quest_core.AttentionConfig.parse("quest+gqa(kv_heads=2)")
    assert "unread_of_a_test" not in sys.modules


# --- quest new-mechanism ----------------------------------------------------------------------------------------------


def test_new_mechanism_copies_the_example_under_another_name(tmp_path):
    assert cli.main(["new-mechanism", "my-own", "--out", str(tmp_path)]) == 0
    folder = tmp_path / "quest-my-own"
    left = [path for path in folder.rglob("*") if path.is_file() and "power" in f"{path}{path.read_text()}".lower()]
    assert left == []
    code = f"import sys; sys.path.insert(0, {str(folder / 'src')!r}); import quest_my_own, quest_core; "
    code += "assert quest_my_own.MyOwn.name == 'my-own'; quest_core.AttentionConfig.parse('my-own(p=3)')"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("kind", "name"), [("mechanism", "power-law"), ("plugin", "my-toy")])
def test_a_name_may_contain_that_of_the_example(tmp_path, kind, name):
    assert cli.main([f"new-{kind}", name, "--out", str(tmp_path)]) == 0
    folder, module = tmp_path / f"quest-{name}", f"quest_{name.replace('-', '_')}"
    assert [path.name for path in (folder / "src").iterdir()] == [module]
    project = (folder / "pyproject.toml").read_text()
    assert f'packages = ["src/{module}"]' in project
    assert f'= "{module}' in project.partition("entry-points")[2]


@pytest.mark.parametrize(
    ("kind", "name"), [("plugin", "core"), ("plugin", "torch"), ("mechanism", "timm"), ("mechanism", "gqa")]
)
def test_names_that_are_taken(tmp_path, capsys, kind, name):
    assert cli.main([f"new-{kind}", name, "--out", str(tmp_path)]) != 0
    assert "already; choose another" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_shows_the_example():
    root = Path(__file__).parents[1]
    page = (root / "docs" / "writing-a-mechanism.md").read_text()
    source = (root / "examples/third_party_mechanism/src/quest_power/__init__.py").read_text()
    assert source.partition('"""\n\n')[2] in page
    softpick = (root / "plugins/quest-zoo/src/quest_zoo/softpick.py").read_text()
    assert softpick[softpick.index("@register") :] in page


@pytest.mark.parametrize("name", ["Mine", "a_b", "quest-own", "true", ""])
def test_names_that_cannot_be_copied_to(tmp_path, name):
    with pytest.raises(ConfigError, match="expected lower-case letters"):
        copy_example("third_party_mechanism", "power", name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_as_it_was(tmp_path):
    (tmp_path / "quest-own").mkdir()
    with pytest.raises(ConfigError, match="'.*quest-own' exists"):
        copy_example("third_party_mechanism", "power", "own", tmp_path)
    assert list((tmp_path / "quest-own").iterdir()) == []
