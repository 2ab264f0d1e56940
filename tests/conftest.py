"""Settings for every test."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, nothing about the property.
settings.register_profile("fd_core", deadline=None, suppress_health_check=(HealthCheck.too_slow,))
settings.load_profile("fd_core")
