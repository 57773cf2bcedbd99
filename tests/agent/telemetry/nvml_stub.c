/* A libnvidia-ml.so.1 for tests: what it answers is what `stub` says. Layouts and numbers are those of nvml.h. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, VERSION_1 = 1, FIELD_TX = 197, FIELD_RX = 198, GPM_TX = 20, GPM_RX = 21 };

struct {
    int32_t init, handle, fields, gpm, throughput, utilization; /* what these calls return */
    int32_t gpm_supported, value_type, initialised, samples;
    uint32_t busy_percent, narrow; /* narrow: counters wrap at 32 bits, whatever their type */
    uint64_t tx, rx; /* bytes so far */
    double tx_mib, rx_mib;
    int32_t mig_mode, mig_uuid; /* the GPU is divided; the UUID is that of a part */
} stub;

typedef struct {
    uint32_t id, scope;
    int64_t timestamp, latency;
    uint32_t type, returned;
    union { uint32_t u32; uint64_t u64; } value;
} field_value;

typedef struct { uint32_t id, returned; double value; char *names[3]; } gpm_metric;
typedef struct { uint32_t version, count; void *first, *second; gpm_metric metrics[]; } gpm_metrics;
typedef struct { uint32_t version, supported; } gpm_support;
typedef struct { uint32_t gpu, memory; } utilization_rates;

int nvmlInitWithFlags(unsigned flags) { (void)flags; if (!stub.init) stub.initialised++; return stub.init; }
int nvmlShutdown(void) { stub.initialised--; return SUCCESS; }

int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    *device = &stub;
    return stub.handle || !strncmp(uuid, stub.mig_uuid ? "MIG-" : "GPU-", 4) ? stub.handle : NOT_FOUND;
}

int nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    (void)device;
    *current = *pending = stub.mig_mode == 1;
    return stub.mig_mode < 0 ? NOT_SUPPORTED : SUCCESS;
}

int nvmlDeviceGetFieldValues(void *device, int count, field_value *values) {
    (void)device;
    for (int i = 0; i < count; i++) {
        uint64_t bytes = (values[i].id == FIELD_TX ? stub.tx : stub.rx) & (stub.narrow ? UINT32_MAX : UINT64_MAX);
        values[i].returned = stub.fields;
        values[i].type = stub.value_type;
        if (stub.value_type == 1) values[i].value.u32 = (uint32_t)bytes; else values[i].value.u64 = bytes;
        if (values[i].id != FIELD_TX && values[i].id != FIELD_RX) return NOT_SUPPORTED;
    }
    return SUCCESS;
}

int nvmlGpmQueryDeviceSupport(void *device, gpm_support *found) {
    (void)device;
    found->supported = stub.gpm_supported;
    return found->version == VERSION_1 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlGpmSampleAlloc(void **sample) { *sample = calloc(1, 16); stub.samples++; return SUCCESS; }
int nvmlGpmSampleFree(void *sample) { free(sample); stub.samples--; return SUCCESS; }
int nvmlGpmSampleGet(void *device, void *sample) { (void)device; *(char *)sample = 1; return stub.gpm; }

int nvmlGpmMetricsGet(gpm_metrics *wanted) {
    if (wanted->version != VERSION_1 || !*(char *)wanted->first || !*(char *)wanted->second) return NOT_SUPPORTED;
    for (uint32_t i = 0; i < wanted->count; i++) {
        wanted->metrics[i].returned = SUCCESS;
        wanted->metrics[i].value = wanted->metrics[i].id == GPM_TX ? stub.tx_mib : stub.rx_mib;
    }
    return SUCCESS;
}

int nvmlDeviceGetPcieThroughput(void *device, unsigned counter, unsigned *kib) {
    (void)device;
    *kib = (unsigned)(1024 * (counter == 0 ? stub.tx_mib : stub.rx_mib));
    return stub.throughput;
}

int nvmlDeviceGetUtilizationRates(void *device, utilization_rates *rates) {
    (void)device;
    rates->gpu = stub.busy_percent;
    return stub.utilization;
}
