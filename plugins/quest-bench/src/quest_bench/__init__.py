"""`quest bench`: runs the benchmark suites of installed plugins over attentions and seeds, and reports them."""
