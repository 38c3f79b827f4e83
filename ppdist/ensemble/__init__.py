"""Ensembles: several models' boxes fused, or their weights averaged.

fuse         boxes of members, by wbf (and its relatives), of several views of a model (tta)
model_soup   weights, with new statistics of batch norm
"""
