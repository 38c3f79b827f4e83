"""What tests of stores share with those of data/."""

from tests.unit.data.conftest import checked_here as checked_here
