"""Shared by all tests: the CPU set-up must be in force before anything imports Paddle."""

from erniekit.environment import apply_cpu_settings

apply_cpu_settings(threads=2)

pytest_plugins = ["tests.tiny_runs"]
