/* A libnvidia-ml.so.1 for tests: no GPU, but the library's own calls, so that the real pynvml runs over it.
 *
 * What it answers is read at each call from the file that NVML_STUB names, a "key value" a line:
 *
 *   gpus 8              how many; driver 570.86.15; init 9 (what nvmlInit returns); gpm 1 (performance monitoring is offered)
 *   3.temperature 91    of GPU 3; *.temperature 45 of all that have no line of their own; none: not supported; error:16: that code
 *   3.lost 15           every call on GPU 3 returns this
 *   3.hang 30           every call on it sleeps so many seconds; 3.hang_d 30 in state D (a vfork whose child sleeps)
 *   init_hang 30        so does nvmlInit
 *   3.field.145 1       a field value; 3.link.2.active 0, 3.link.2.counter.1 5, 3.link.2.field.138 9 of its link 2
 *   3.gpm.5 40.5        a metric
 *   event 7 3 79        the event numbered 7: Xid 79 on GPU 3 (each number is told once)
 *
 * With -DOLD it has only what drivers of about 2020 export.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, TIMEOUT = 10 };
typedef struct gpu *device;
typedef unsigned long long u64;

static void nap(double s) {
    struct timespec t = {(time_t)s, (long)((s - (time_t)s) * 1e9)};
    nanosleep(&t, NULL);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char script[65536];

/* The script as it is now: looked at at each call, read where it is another. */
static void load(void) {
    static struct stat read;
    struct stat now;
    const char *path = getenv("NVML_STUB");
    if (!path || stat(path, &now) || (now.st_ino == read.st_ino && now.st_mtim.tv_nsec == read.st_mtim.tv_nsec)) return;
    FILE *file = fopen(path, "r");
    if (!file) return;
    script[0] = '\n';
    script[1 + fread(script + 1, 1, sizeof script - 2, file)] = 0;
    fclose(file);
    read = now;
}

/* The value of a key in the script: 1 if it is there. */
static int find(const char *key, char *out, size_t size) {
    char start[160];
    int length = snprintf(start, sizeof start, "\n%s ", key);
    pthread_mutex_lock(&lock);
    load();
    const char *line = strstr(script, start);
    if (line) snprintf(out, size, "%.*s", (int)strcspn(line + length, "\n"), line + length);
    pthread_mutex_unlock(&lock);
    return line != NULL;
}

static int look(int index, const char *name, char *out, size_t size) {
    char key[128];
    snprintf(key, sizeof key, "%d.%s", index, name);
    if (find(key, out, size)) return 1;
    snprintf(key, sizeof key, "*.%s", name);
    return find(key, out, size);
}

static double whole(const char *name, double otherwise) {
    char text[128];
    return find(name, text, sizeof text) ? atof(text) : otherwise;
}

static int index_of(device d) { return (int)((size_t)d >> 4) - 1; }

/* Uninterruptible sleep, as in a call that the driver does not return from: a vfork waits for its child so. */
static void sleep_d(double s) {
    pid_t child = vfork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        nap(s);
        _exit(0);
    }
}

/* What every call on a GPU does first. */
static int touch(device d) {
    char text[128];
    int i = index_of(d);
    if (look(i, "hang", text, sizeof text)) nap(atof(text));
    if (look(i, "hang_d", text, sizeof text)) sleep_d(atof(text));
    if (look(i, "lost", text, sizeof text)) return atoi(text);
    return OK;
}

/* A number of a GPU's: NOT_SUPPORTED where the script does not have it. */
static int value(device d, double *out, const char *format, ...) {
    char name[96], text[128];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(name, sizeof name, format, arguments);
    va_end(arguments);
    int code = touch(d);
    if (code) return code;
    if (!look(index_of(d), name, text, sizeof text) || !strcmp(text, "none")) return NOT_SUPPORTED;
    if (!strncmp(text, "error:", 6)) return atoi(text + 6);
    *out = atof(text);
    return OK;
}

static int number(device d, unsigned *out, const char *name) {
    double v;
    int code = value(d, &v, "%s", name);
    if (!code) *out = (unsigned)v;
    return code;
}

static int text_of(device d, const char *name, const char *otherwise, char *out, unsigned size) {
    char text[128];
    int code = touch(d);
    if (code) return code;
    snprintf(out, size, "%s", look(index_of(d), name, text, sizeof text) ? text : otherwise);
    return strcmp(out, "none") ? OK : NOT_SUPPORTED;
}

/* The library */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (whole("init_hang", 0)) nap(whole("init_hang", 0));
    puts("the library prints what it likes"); /* must not be taken for an answer */
    fflush(stdout);
    return (int)whole("init", 0);
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "an error of the stub's"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    if (!find("driver", out, size)) snprintf(out, size, "570.86.15");
    return OK;
}
int nvmlSystemGetNVMLVersion(char *out, unsigned size) { snprintf(out, size, "12.570.86.15"); return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)whole("gpus", 8); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *out) {
    *out = (device)((size_t)(index + 1) << 4);
    return touch(*out);
}

int nvmlDeviceGetUUID(device d, char *out, unsigned size) {
    char plain[64];
    snprintf(plain, sizeof plain, "GPU-%08d-0000-0000-0000-000000000000", index_of(d));
    return text_of(d, "uuid", plain, out, size);
}
int nvmlDeviceGetSerial(device d, char *out, unsigned size) {
    char plain[64];
    snprintf(plain, sizeof plain, "16500000%05d", index_of(d));
    return text_of(d, "serial", plain, out, size);
}
int nvmlDeviceGetName(device d, char *out, unsigned size) { return text_of(d, "model", "NVIDIA H100 80GB HBM3", out, size); }
int nvmlDeviceGetVbiosVersion(device d, char *out, unsigned size) { return text_of(d, "vbios", "96.00.89.00.01", out, size); }

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(device d, struct pci *out) {
    int code = touch(d);
    if (code) return code;
    memset(out, 0, sizeof *out);
    out->bus = 0x10 + 0x10 * (unsigned)index_of(d);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", out->bus);
    return OK;
}

int nvmlDeviceGetTemperature(device d, unsigned sensor, unsigned *out) { (void)sensor; return number(d, out, "temperature"); }
int nvmlDeviceGetTemperatureThreshold(device d, unsigned which, unsigned *out) { (void)which; return number(d, out, "slowdown"); }

int nvmlDeviceGetUtilizationRates(device d, unsigned *out) {
    int code = number(d, out, "utilization");
    return code ? code : number(d, out + 1, "memory_utilization");
}
struct memory { u64 total, free, used; };
int nvmlDeviceGetMemoryInfo(device d, struct memory *out) {
    double used;
    int code = value(d, &used, "memory_used");
    if (code) return code;
    out->total = 80ULL << 30;
    out->used = (u64)used;
    out->free = out->total - out->used;
    return OK;
}
int nvmlDeviceGetPowerUsage(device d, unsigned *out) { return number(d, out, "power_mw"); }
int nvmlDeviceGetPowerManagementLimit(device d, unsigned *out) { return number(d, out, "power_cap_mw"); }
int nvmlDeviceGetPowerManagementDefaultLimit(device d, unsigned *out) { return number(d, out, "power_cap_default_mw"); }
int nvmlDeviceGetClockInfo(device d, unsigned type, unsigned *out) { return number(d, out, type == 1 ? "sm_clock" : "memory_clock"); }
int nvmlDeviceGetMaxClockInfo(device d, unsigned type, unsigned *out) { (void)type; return number(d, out, "sm_clock_max"); }
int nvmlDeviceGetApplicationsClock(device d, unsigned type, unsigned *out) {
    return number(d, out, type == 1 ? "application_sm_clock" : "application_memory_clock");
}
static int reasons(device d, u64 *out) {
    double v;
    int code = value(d, &v, "clock_reasons");
    if (!code) *out = (u64)v;
    return code;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(device d, u64 *out) { return reasons(d, out); }
int nvmlDeviceGetPersistenceMode(device d, unsigned *out) { return number(d, out, "persistence"); }
int nvmlDeviceGetEccMode(device d, unsigned *now, unsigned *pending) {
    int code = number(d, now, "ecc");
    return code ? code : number(d, pending, "ecc");
}
int nvmlDeviceGetCurrPcieLinkWidth(device d, unsigned *out) { return number(d, out, "pcie_width"); }
int nvmlDeviceGetMaxPcieLinkWidth(device d, unsigned *out) { return number(d, out, "pcie_width_max"); }
int nvmlDeviceGetCurrPcieLinkGeneration(device d, unsigned *out) { return number(d, out, "pcie_generation"); }
int nvmlDeviceGetMaxPcieLinkGeneration(device d, unsigned *out) { return number(d, out, "pcie_generation_max"); }
int nvmlDeviceGetPcieReplayCounter(device d, unsigned *out) { return number(d, out, "pcie_replays"); }
int nvmlDeviceGetPcieThroughput(device d, unsigned way, unsigned *out) { (void)way; return number(d, out, "pcie_kib"); }
int nvmlDeviceGetNvLinkState(device d, unsigned link, unsigned *out) {
    char name[32];
    snprintf(name, sizeof name, "link.%u.active", link);
    return number(d, out, name);
}
int nvmlDeviceGetNvLinkErrorCounter(device d, unsigned link, unsigned counter, u64 *out) {
    double v;
    int code = value(d, &v, "link.%u.counter.%u", link, counter);
    if (!code) *out = (u64)v;
    return code;
}

struct field { unsigned id, scope; long long at, took; unsigned type; int code; union { double d; unsigned u; u64 l; } value; };
int nvmlDeviceGetFieldValues(device d, int count, struct field *fields) {
    for (int i = 0; i < count; i++) {
        double v = 0;
        if (fields[i].id >= 138 && fields[i].id != 230)
            fields[i].code = value(d, &v, "link.%u.field.%u", fields[i].scope, fields[i].id);
        else
            fields[i].code = value(d, &v, "field.%u", fields[i].id);
        if (fields[i].code == 15) return 15;
        fields[i].type = fields[i].id < 29 ? 3 : 1;
        if (fields[i].type == 3) fields[i].value.l = (u64)v;
        else fields[i].value.u = (unsigned)v;
    }
    return OK;
}

#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(device d, u64 *out) { return reasons(d, out); }
int nvmlDeviceGetMigMode(device d, unsigned *now, unsigned *pending) {
    int code = number(d, now, "mig");
    return code ? code : number(d, pending, "mig");
}
int nvmlDeviceGetRemappedRows(device d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    int code = number(d, corrected, "remapped_corrected");
    if (!code) code = number(d, uncorrected, "remapped_uncorrected");
    if (!code) code = number(d, pending, "remap_pending");
    return code ? code : number(d, failed, "remap_failed");
}
struct process { unsigned pid; u64 memory; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *count, struct process *out) {
    unsigned pid, room = *count;
    int code = number(d, &pid, "process");
    if (code == NOT_SUPPORTED) { *count = 0; return OK; }
    if (code) return code;
    *count = 1;
    if (room < 1 || !out) return SMALL;
    memset(out, 0, sizeof *out);
    out->pid = pid;
    return OK;
}

/* Performance monitoring */
struct sample { int index; };
struct support { unsigned version, yes; };
int nvmlGpmQueryDeviceSupport(device d, struct support *out) { out->yes = (unsigned)whole("gpm", 0); return touch(d); }
int nvmlGpmSampleAlloc(struct sample **out) { *out = calloc(1, sizeof **out); return OK; }
int nvmlGpmSampleFree(struct sample *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(device d, struct sample *out) { out->index = index_of(d) + 1; return touch(d); }
struct metric { unsigned id; int code; double value; const char *names[3]; };
struct metrics { unsigned version, count; struct sample *one, *two; struct metric metrics[]; };
int nvmlGpmMetricsGet(struct metrics *m) {
    if (m->version != 1 || !m->one->index || m->one->index != m->two->index) return INVALID;
    device d = (device)((size_t)m->two->index << 4);
    for (unsigned i = 0; i < m->count; i++) m->metrics[i].code = value(d, &m->metrics[i].value, "gpm.%u", m->metrics[i].id);
    return OK;
}

/* Events */
static u64 told;
struct event { device d; u64 type, data; unsigned instance, compute; };
int nvmlEventSetCreate(void **out) { *out = &told; return OK; }
int nvmlEventSetFree(void *set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(device d, u64 types, void *set) { (void)types; (void)set; return touch(d); }
int nvmlEventSetWait_v2(void *set, struct event *out, unsigned wait_ms) {
    (void)set;
    for (unsigned waited_ms = 0; waited_ms <= wait_ms; waited_ms += 20, nap(0.02)) {
        char text[128];
        u64 event;
        unsigned gpu, xid;
        if (find("event", text, sizeof text) && sscanf(text, "%llu %u %u", &event, &gpu, &xid) == 3 && event > told) {
            told = event;
            memset(out, 0, sizeof *out);
            out->d = (device)((size_t)(gpu + 1) << 4);
            out->type = 8;
            out->data = xid;
            return OK;
        }
    }
    return TIMEOUT;
}
#endif
