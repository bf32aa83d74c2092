"""Imported for image models alone."""

from stand_in import stand_in_for

__version__ = "0.28.0"

stand_in_for(__name__)
