"""Several models as one: their boxes fused (`fuse`, of `fusion`, `members`, `views`, `saved`), or
their weights averaged (`average`, of `soup`, `statistics`)."""
