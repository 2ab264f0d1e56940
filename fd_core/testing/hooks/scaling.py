"""The cases that every scaling policy has to pass.

A policy is pure: two instances with the same loads propose the same numbers, independent of the process's clock and
random numbers. Groups in virtual time show whether the number follows the load and settles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest

from fd_core.cluster.scaling import GroupLoad, ScalingPolicy
from fd_core.errors import ConfigError
from fd_core.plugins import SCALING_POLICY, installed_plugins
from fd_core.testing.axes.parts import KitCase
from fd_core.testing.hooks.loads import GROUPS, SCALING, Group, numbers_of, require_ordinary_day
from fd_core.testing.hooks.purity import require_freed
from fd_core.testing.kit.growth import require_bounded
from fd_core.testing.kit.requirements import OPEN, ReadNames, Requirement, constructed, lacks

_VALUES = (False, True, 0.05, 0.5, 1, 3, 30, 1000)
"""Values of an option, of which a policy may refuse some."""


class ScalingPolicySuite:
    """Derive a class `Test...` from it and name the policy."""

    policy: str
    """Value of `policy` in the file of `fdcore cluster serve`."""
    follows_load: Requirement = OPEN
    """The number grows with the load and shrinks without it."""
    tunable: Requirement = OPEN
    """Each of its options changes the number in two hours of load; closed for one whose options matter otherwise."""

    def policy_class(self) -> type[ScalingPolicy]:
        """Return the class of the policy; override for a class that no plugin registers."""
        return installed_plugins().load(SCALING_POLICY, self.policy)

    def options(self) -> Mapping[str, Any]:
        """Return the options of the file: each one that the policy has, with a value of it."""
        return {}

    def new_policy(self) -> ScalingPolicy:
        """Create the policy as a deployment does for one group."""
        return self.policy_class()(MappingProxyType(dict(self.options())))

    def construct(self) -> None:
        """Construct the plugin. Raises `PluginError`."""
        constructed(SCALING_POLICY, self.policy_class(), self.new_policy)

    @pytest.mark.law("8")
    @pytest.mark.fd_cases(SCALING)
    def test_case(self, case: KitCase) -> None:
        case.check(self.new_policy, "pytest", option="--fd-case")

    @pytest.mark.law("8")
    @pytest.mark.fd_thorough
    @pytest.mark.parametrize("group", [*GROUPS])
    def test_an_ordinary_day(self, group: str) -> None:
        require_ordinary_day(self.new_policy, GROUPS[group], self.follows_load)

    @pytest.mark.law("8")
    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(ConfigError, match=r"no.such.option"):
            self.policy_class()(MappingProxyType({**self.options(), "no-such-option": 1}))

    @pytest.mark.law("8")
    def test_wrong_values_of_options_are_refused_by_name(self) -> None:
        """Otherwise the controller fails, or ignores the option, when the load first depends on it.

        Tries the options of `options`, and those that the policy reads one by one.
        """
        for name, wrong in product(self._names(), ({"a": 1}, math.nan)):
            with pytest.raises(ConfigError) as caught:
                self.policy_class()(MappingProxyType({**self.options(), name: wrong}))
                pytest.fail(f"the value {wrong!r} of the option {name} is accepted")
            said = f"{caught.value.message} {caught.value.field}"
            assert name in said, f"the error for the value {wrong!r} of the option {name} does not name it: {said}"

    @pytest.mark.law("8")
    def test_some_values_of_each_option_have_other_numbers(self) -> None:
        """Run groups whose load rises and falls, with every value that is accepted: one without effect misleads."""
        for name in self._names():
            self.tunable.require()
            others = {key: value for key, value in self.options().items() if key != name}
            tried = [self.options(), others, *({**others, name: value} for value in _VALUES)]
            assert any(self._differ(tried, group) for group in GROUPS.values()), (
                f"{name} never changes a number; use it, or close `tunable`"
            )

    @pytest.mark.law("8")
    def test_options_of_a_group_change_no_other_group(self) -> None:
        """Create other groups, each with another value of an option, after the one whose numbers are compared."""

        def in_company() -> ScalingPolicy:
            made = self.new_policy()
            for name, value in product(self._names(), _VALUES):
                with suppress(ConfigError):
                    self.policy_class()(MappingProxyType({**self.options(), name: value}))
            return made

        group = GROUPS["chat"]
        assert numbers_of(self.new_policy, group) == numbers_of(in_company, group), (
            "a group has other numbers if the file has groups with other options: instances share their options"
        )

    def _names(self) -> list[str]:
        """Return the names of the options of `options`, and of those that the policy reads one by one."""
        given = ReadNames(self.options())
        self.policy_class()(given)
        if not (names := given.read | {*self.options()}):
            lacks("no options are known: return each with a value of it in `options` of the suite")
        return sorted(names)

    def _differ(self, tried: Sequence[Mapping[str, Any]], group: Group) -> bool:
        """Return True if a group has other numbers with some of these options."""
        first: list[int] = []
        for options in tried:
            with suppress(ConfigError):
                counts = numbers_of(partial(self.policy_class(), MappingProxyType({**options})), group)
                if counts != (first := first or counts):
                    return True
        return False

    @pytest.mark.law("8")
    def test_it_forgets_loads(self) -> None:
        policy = self.new_policy()

        def use(call: int) -> None:
            load = GroupLoad(
                role="mixed", target=3, ready=3, running=40, slots=48, kv_usage=0.7, ttft_seconds=call / 1e4
            )
            policy.propose(load, 60.0 * call)

        require_bounded(use, 1000, "loads", "8")
        require_freed(self.new_policy)
