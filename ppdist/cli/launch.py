"""Starts a command on each card: the same as `fleetrun`."""

from ppdist.launch.cli import main as main
