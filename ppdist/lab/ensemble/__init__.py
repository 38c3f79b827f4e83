"""Ensembles: several models' boxes fused, or their weights averaged.

fuse         boxes of models, each in one or several views (tta), by weighted fusion (wbf)
views        the same of single images, for `ppdist predict --augment`
model_soup   weights, with new statistics of batch norm
"""
