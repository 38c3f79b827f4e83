"""What runs exported models, with or without ppdist.

Where there is no ppdist it is a package of its own, `ppdist_runtime`: it imports nothing of ppdist,
and its own modules by relative names, so both names work.  deploy/python links to this folder, and
makes the wheel `ppdist-runtime` of it.
"""

__version__ = "0.1.0"
