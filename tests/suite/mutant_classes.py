"""The suite on every mutant, where pytest finds it; see ``inner.py``."""

from tests.suite.inner import classes

globals().update(classes())
