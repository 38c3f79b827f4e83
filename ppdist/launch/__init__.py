"""The front over Paddle's launcher; nothing here imports paddle.  Read in this order:

options (what was typed), cards (which GPUs), network (which host, which ports), plan (what Paddle's
launcher is given), process (running it), worker (what it runs for each rank), outcome (how it
ended), fleetrun (the command), stock (Paddle's own script of the same name), doctor (preflight).
Several hosts: connection (messages), greeting (what must agree), meeting (before the run), line
(during it).
"""
