"""What headrace does not bring: the data source and the network of project_name."""
