"""Ensembles: several models' boxes fused, or their weights averaged.

fuse         boxes of models, each in one or several views (tta), by weighted fusion (wbf)
model_soup   weights, with new statistics of batch norm
"""
