{{/* Name of the release's objects. */}}
{{- define "fd-core.name" -}}
{{- if contains "fd-core" .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-fd-core{{ end -}}
{{- end }}

{{/* Labels by which objects find their pods: dict root, part. */}}
{{- define "fd-core.selector" -}}
app.kubernetes.io/name: fd-core
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{/* Labels of every object: dict root, part. */}}
{{- define "fd-core.labels" -}}
{{ include "fd-core.selector" . }}
app.kubernetes.io/part-of: fd-core
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- end }}

{{- define "fd-core.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* A map of settings as flags, one a line. */}}
{{- define "fd-core.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $name }}
{{- else }}
{{- range $one := (kindIs "slice" $value | ternary $value (list $value)) }}
- {{ printf "--%s=%s" $name (include "fd-core.plain" $one) | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* A value as it is written: helm reads whole numbers as floats, and writes large ones with an exponent. */}}
{{- define "fd-core.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* What every worker has, and on top of it what its role has: dict root, role. Written as JSON. */}}
{{- define "fd-core.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.worker) (deepCopy (index .root.Values.roles .role)) | toJson }}
{{- end }}

{{/* Roles that have workers, as a JSON list. */}}
{{- define "fd-core.roles" -}}
{{- $roles := list }}
{{- range $role := list "mixed" "prefill" "decode" }}
{{- $worker := include "fd-core.worker" (dict "root" $ "role" $role) | fromJson }}
{{- if gt (int $worker.replicas) 0 }}{{ $roles = append $roles $role }}{{ end }}
{{- end }}
{{- $roles | toJson }}
{{- end }}

{{/* Whether prompts are computed elsewhere: both sides of pairs, or none. */}}
{{- define "fd-core.pairs" -}}
{{- $roles := include "fd-core.roles" . | fromJsonArray }}
{{- if not $roles }}{{ fail "no role has replicas: set roles.mixed.replicas, or both of roles.prefill.replicas and roles.decode.replicas" }}{{ end }}
{{- if ne (has "prefill" $roles) (has "decode" $roles) }}{{ fail "pairs need both roles.prefill.replicas and roles.decode.replicas" }}{{ end }}
{{- if has "prefill" $roles }}true{{ end }}
{{- end }}

{{/* Seconds after which a pod is killed: what it may take to leave, and to end what it aborts. */}}
{{- define "fd-core.grace" -}}
{{ add (int .drainDelay) (int .drainSeconds) 30 }}
{{- end }}

{{- define "fd-core.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "fd-core.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Entries of the Secret as files that the process's group may read: dict root, keys. */}}
{{- define "fd-core.secretVolume" -}}
- name: secret
  secret:
    secretName: {{ .root.Values.secret }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end }}

{{/* One pod of each kind on a node before a second one: dict root, part. */}}
{{- define "fd-core.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "fd-core.selector" . | nindent 6 }}
{{- end }}

{{/* Selector of pods in a NetworkPolicy: dict root, part. */}}
{{- define "fd-core.peer" -}}
podSelector:
  matchLabels:
    {{- include "fd-core.selector" . | nindent 4 }}
{{- end }}
