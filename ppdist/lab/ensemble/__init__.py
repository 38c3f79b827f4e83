"""Ensembles: several models' boxes fused, or their weights averaged.

fuse         boxes of several models, each in one or more views (tta), by weighted fusion (wbf)
views        the same for single images, for `ppdist predict --augment`
model_soup   averaged weights, with new batch-norm statistics
"""
