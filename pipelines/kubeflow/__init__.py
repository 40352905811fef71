"""What runs on Kubeflow Pipelines: pods, image, API."""
