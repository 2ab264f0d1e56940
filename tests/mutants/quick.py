"""A pytest plugin for runs that only ask whether a fault is noticed: fixed examples, no search for smaller ones."""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True)
settings.load_profile("mutants")
