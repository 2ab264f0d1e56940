"""Old name of `fd_core.backends.device_assignment`."""

from fd_core.deprecations import old_attributes

__getattr__ = old_attributes(__name__)
