"""What tools/ensemble.py takes where nothing is said; light, for its --help."""

METHODS = ("wbf", "nms", "soft-nms-linear", "soft-nms-gaussian")
IOU = {"wbf": 0.55, "nms": 0.7, "soft-nms-linear": 0.3}  # of the papers; nms: nms.iou_threshold's
SIGMA = 0.5
# Suppression within a view is stricter than a cluster of wbf is wide, by this: boxes that one view
# has around an object join its cluster and make it less sure.  Measured on one under-trained model:
# see the table in docs/dev/ensembling.md.
VIEW_MARGIN = 0.1
IMAGES = 2048
