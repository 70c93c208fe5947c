"""The texts of widths/*."""

from zipfile import ZipFile

from quest_research.suites.widths import untagged


def test_the_brown_corpus_is_read_without_tags_and_every_tenth_text_comes_last(tmp_path):
    with ZipFile(tmp_path / "brown.zip", "w") as file:
        file.writestr("brown/README", "BROWN CORPUS")
        file.writestr("brown/ca10", "\n\n\tand/cc 1/2/cd")
        file.writestr("brown/ca11", "\tThe/at jury/nn\n\n\n\tsaid/vbd ./.\n")
    assert untagged(tmp_path / "brown.zip") == "The jury\nsaid .\nand 1/2"
