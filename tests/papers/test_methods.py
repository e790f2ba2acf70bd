"""Methods of papers are found by name."""

from hf_mmparallel.plan import methods


def test_every_name_leads_to_a_method():
    assert all(methods.published_method(name) for name in methods._PUBLISHED)
