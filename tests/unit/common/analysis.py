"""A small evaluation.json with curves."""

ANALYSIS = {
    "class_names": ["RBC", "WBC", "none"],
    "per_class": [{"objects": 20}, {"objects": 4}, {"objects": 0}],
    "curves": {
        "confidence_T": [0.0, 0.5, 1.0],
        "precision_CT": [[0.5, 0.8, None], [0.25, 1.0, 1.0], [None, None, None]],
        "recall_CT": [[1.0, 0.6, 0.0], [1.0, 0.5, 0.0], [None, None, None]],
    },
}
