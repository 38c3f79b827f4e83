"""Runtime for exported models, with or without ppdist.

Without ppdist it is a separate package, `ppdist_runtime`: it imports nothing from ppdist, and
imports its own modules by relative names, so both package names work.  deploy/python links to this
folder and builds the wheel `ppdist-runtime` from it.
"""

__version__ = "0.1.0"
