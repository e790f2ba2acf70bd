"""Checks whether the Hub has a model or dataset, once and without the client's retries of half a minute."""

from __future__ import annotations

_SECONDS = 10.0  # for an answer of a slow network


def check_hub(
    kind: str,  # "model" or "dataset"
    name: str,  # its id
    subject: str,  # start of the message, such as "Dataset `a/b`"
    remedy: str,  # if the Hub can't be reached
) -> None:
    """Raises `ValueError` unless the Hub has a model or a dataset, which may also be in its cache."""
    from huggingface_hub import HfApi, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if is_offline_mode():  # it may be in the cache
        return
    missing = f"{subject} is no file or folder here"
    try:
        if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        getattr(HfApi(), f"{kind}_info")(name, timeout=_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{missing}, and the Hub has none of this name: {reason}. Correct it.") from error
    except Exception as error:  # whatever the client raises without a network
        raise ValueError(
            f"{missing}, and the Hub, where it may be, can't be reached ({error}). {remedy}; for a {kind} that was "
            "downloaded before set `HF_HUB_OFFLINE=1`."
        ) from error
