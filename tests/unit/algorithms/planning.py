"""Plans of algorithms, for the tests of this folder."""

from crossdevice.plans.builder import PlanBuilder

COUNTS = (*range(1, 18), 31, 32, 33)
"""Replica counts for tests that need not go through all of them."""


def planned(algorithm, devices, destinations, length=640, pack_number=0):
    build = PlanBuilder(devices, length, pack_number)
    return build.plan(algorithm.plan_sum(build, destinations))
