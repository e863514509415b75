"""Runnable configurations, one file each: `penstock recipes` lists them, `penstock train NAME` runs one."""
