"""What `quest bench ls` shows; it imports nothing, so that listing suites stays quick."""

SUITES = {
    "own/csv": {
        "summary": "classes of sequences, one per line of a CSV file",
        "tasks": ["lines"],
        "metric": "accuracy",
        "unit": "%",
        "higher_is_better": True,
        "options": [{"name": "epochs", "kind": "int", "default": 20, "minimum": 1, "doc": "passes over the data"}],
        "data": "a folder with train.csv and test.csv; a line is a class number and then the values",
        "data_required": True,
        "data_files": ["train.csv", "test.csv"],
        "selection": "last",
    }
}
