"""Correct router policies that differ from those of the core."""

from __future__ import annotations

import zlib
from collections import OrderedDict

from fd_core.router.policies import RouterPolicy, least


class FewWaiting(RouterPolicy):
    """The worker that begins soonest."""

    def choose(self, context):
        return least(context.candidates, lambda each: (each.load.waiting, each.load.requests), context.random)


class LongestPrefix(RouterPolicy):
    """Among the workers with few requests, the one that holds most of the prompt."""

    uses_prefix = True

    def choose(self, context):
        fewest = min(each.load.requests for each in context.candidates)
        there = [each for each in context.candidates if each.load.requests <= fewest + 4]
        return least(there, lambda each: (-each.expected_hits, each.load.requests), context.random)


class Weighted(RouterPolicy):
    """Any worker, those with fewer requests more often."""

    def choose(self, context):
        weights = [1 / (1 + each.load.requests) for each in context.candidates]
        left = context.random * sum(weights)
        for each, weight in zip(context.candidates, weights, strict=True):
            left -= weight
            if left < 0:
                return each
        return context.candidates[-1]


class Rendezvous(RouterPolicy):
    """Each session has a worker, whatever the load; other requests go where there are few."""

    def choose(self, context):
        if context.session is None:
            return least(context.candidates, lambda each: each.load.requests, context.random)
        return max(context.candidates, key=lambda each: zlib.crc32(f"{context.session} {each.worker.url}".encode()))


class SpreadsOverHosts(RouterPolicy):
    """Sessions have a host, of which the least busy worker serves them; other requests go to the least busy host."""

    def choose(self, context):
        hosts = {}
        for each in context.candidates:
            hosts.setdefault(each.worker.url.rpartition(":")[0], []).append(each)
        if context.session is None:
            busy = {host: sum(each.load.requests for each in there) / len(there) for host, there in hosts.items()}
            host = min(busy, key=lambda each: (busy[each], zlib.crc32(f"{context.random} {each}".encode())))
        else:
            host = max(hosts, key=lambda each: zlib.crc32(f"{context.session} {each}".encode()))
        return least(hosts[host], lambda each: each.load.requests, context.random)


class Recent(RouterPolicy):
    """Sessions return, unless their worker is twice as busy."""

    def __init__(self, config):
        super().__init__(config)
        self.homes = OrderedDict()

    def choose(self, context):
        key = context.session
        best = least(context.candidates, lambda each: (each.load.requests, each.load.prefill_tokens), context.random)
        home = next((each for each in context.candidates if each.worker == self.homes.get(key)), best)
        chosen = home if home.load.requests <= 2 * best.load.requests + 4 else best
        if key is None:
            return best
        self.homes[key] = chosen.worker
        self.homes.move_to_end(key)
        if len(self.homes) > self.config.max_sessions:
            self.homes.popitem(last=False)
        return chosen

    def departed(self, worker):
        for key in [key for key, home in self.homes.items() if home == worker]:
            del self.homes[key]
