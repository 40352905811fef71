"""Training by a job of its own: the train step creates a TFJob or a TrainJob on the cluster and follows it to its end."""
