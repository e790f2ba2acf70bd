"""The sentences of the package are those of the snapshot, so that a change of words is seen, in one place."""

from tests.sentences import SNAPSHOT, sentences


def test_sentences_are_those_of_the_snapshot():
    found, kept = sentences().splitlines(), SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changed = [f"- {line}" for line in kept if line not in found] + [f"+ {line}" for line in found if line not in kept]
    assert found == kept, "\n".join(["`python -m tests.sentences` writes the snapshot:", *changed])
