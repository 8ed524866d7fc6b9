/* A stand-in for NVIDIA's NVML: two GPUs, of which the second is partitioned and tells less, and one XID. With
   NVML_HANGS set, the driver no longer answers after the first look. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { unsigned gpu, memory; } utilization;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { void *device; unsigned long long type, data; unsigned gi, ci; } event;

static int gpus[2] = {0, 1};
static int told, looks;

static int index_of(void *device) { return *(int *)device; }

int nvmlInit_v2(void) { return getenv("NVML_BROKEN") ? 9 : 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = &gpus[index]; return 0; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) { *minor = 4 + index_of(device); return 0; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
  snprintf(text, length, "GPU-%d", index_of(device));
  return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned length) { snprintf(text, length, "H100 \"80\""); return 0; }
int nvmlDeviceGetUtilizationRates(void *device, utilization *rates) {
  if (getenv("NVML_HANGS") && looks++ > 1) pause();
  if (index_of(device)) return 3; /* not supported */
  rates->gpu = 87;
  rates->memory = 12;
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory *info) {
  info->total = 80ull << 30;
  info->free = 20ull << 30;
  info->used = 60ull << 30;
  return 0;
}
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned *clock) {
  *clock = kind == 1 ? 1980 : kind == 2 ? 2619 : 0;
  return 0;
}
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *degrees) { *degrees = 61; return sensor ? 2 : 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { *milliwatts = 412500; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *count) {
  if (counter != 0) return 2;
  *count = kind == 0 ? 5 : 1;
  return 0;
}
int nvmlEventSetCreate(void **set) { *set = &told; return 0; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long types, void *set) {
  return types == 8 && set == &told ? 0 : 2;
}
int nvmlEventSetWait_v2(void *set, event *found, unsigned milliseconds) {
  if (told++) {
    usleep(milliseconds * 1000);
    return 10; /* timeout */
  }
  memset(found, 0, sizeof *found);
  found->device = &gpus[0];
  found->type = 8;
  found->data = 79;
  return 0;
}
