"""A module that needs another one, which is not installed."""

import a_module_that_is_not_installed  # type: ignore[import-not-found]  # it is what the test is about

model = a_module_that_is_not_installed.model
