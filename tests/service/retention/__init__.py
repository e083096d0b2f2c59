"""Tests of service.retention."""
