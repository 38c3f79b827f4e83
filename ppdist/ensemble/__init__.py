"""Ensembles: several models' boxes fused, or their weights averaged.

fuse       of fusion (wbf), members, views (tta), saved detections
average    of soup (model_soup), statistics
"""
