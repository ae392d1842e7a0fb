"""The number of examples that a property is tried on: all in `make test-all`, fewer in `make test`."""

from hypothesis import settings

settings.register_profile("all examples", max_examples=100, deadline=None)
settings.register_profile("fewer examples", max_examples=30, deadline=None)


def choose_examples(mark_expression: str) -> None:
    """Chooses for the run that selects tests by this expression; before any property is collected."""
    settings.load_profile("fewer examples" if mark_expression == "not more" else "all examples")


def examples(number: int) -> settings:
    """Asks for another number of examples in `make test-all` than 100."""
    return settings(max_examples=number * settings.default.max_examples // 100)
